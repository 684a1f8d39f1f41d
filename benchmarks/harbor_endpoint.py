"""Time that an endpoint adds to a turn, over the same request at the generation port.

The embedded engine serves a tiny model in this process, and the agents are in another. They play
episodes of several turns at the endpoint. The requests that reach the port are then sent to it
directly, as many at once. The first turn computes the prompt and is not counted. Recorded turns
send each answer to an actor in a process of its own before the agent gets it, as harnesses do.

`added_ms` is the median of a turn's time less that of its own request at the port, `turn_ms` the
median turn, and `port_ms` the median of the requests that were sent directly.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from service_actors import Echo

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.loop import EngineLoop, EngineThread
from composer_mesh.actors.models.policy import build_model, build_tokenizer
from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint
from composer_mesh.actors.rollout_workers.agent_episode import AnswerLog
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode

AGENTS = Path(__file__).with_name("harbor_agents.py")
DOCS = Path(__file__).parents[1] / "docs"
VOCABULARY = 4096
LONG, SHORT = 20_000, 200
"""Tokens of the system message."""
ANSWER = 16
MOST = 32
ROOM = 2000
"""Tokens of a context besides its system message."""
PROTOCOLS = ("chat", "responses", "messages")


@dataclass(frozen=True)
class Load:
    """What is measured: a protocol, its form, episodes at once, and the context's length."""

    protocol: str
    stream: bool
    episodes: int
    context: int
    turns: int
    recorded: bool = False

    @property
    def name(self) -> str:
        form = "streamed" if self.stream else "whole"
        length = "long" if self.context == LONG else "short"
        return f"{self.protocol}_{form}_{self.episodes}_{length}{'_recorded' * self.recorded}"


def loads(quick: bool) -> list[Load]:
    """Return what is measured; the quick form has the streamed turns of one episode."""
    return [
        Load(protocol, stream, episodes, context, 9 if episodes == 1 else 4, recorded)
        for context in (SHORT, LONG)
        for episodes in ((1,) if quick else (1, MOST))
        for protocol in PROTOCOLS
        for stream in ((True,) if quick else (True, False))
        for recorded in ((False, True) if stream and protocol == "messages" else (False,))
    ]


@dataclass
class TimedPort:
    """The generation port, which keeps each request with its answer and its seconds."""

    engine: EngineLoop
    turns: dict[str, list[tuple[GenerationRequest, GenerationResult, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    async def generate(self, request: GenerationRequest, _: str) -> GenerationResult:
        began = time.perf_counter()
        result = await self.engine.ask(request)
        seconds = time.perf_counter() - began
        self.turns[request.request_id.rpartition("-")[0]].append((request, result, seconds))
        return result


@asynccontextmanager
async def served(tokenizer: Any) -> AsyncIterator[EngineLoop]:
    """Serve a tiny model whose context holds the longest episode."""
    policy = PolicyConfig(
        hidden_size=32,
        intermediate_size=64,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        max_context=LONG + ROOM,
    )
    thread = EngineThread()
    engine = await thread.run(
        lambda: EmbeddedEngine(build_model(policy, tokenizer, 0).eval(), MOST, LONG + ROOM)
    )
    loop = EngineLoop(engine, thread)
    serving = asyncio.create_task(loop.serve())
    try:
        yield loop
    finally:
        await cancel_and_wait([serving])
        thread.end()


def log_at(actor: SpawnedActor) -> AnswerLog:
    """Return a log whose answers are sent to an actor, which sends them back."""

    async def keep(answer: bytes) -> None:
        await actor.call("echo", answer)

    return AnswerLog(keep, lambda *_: None)


async def at_the_endpoint(
    endpoint: AgentEndpoint, load: Load, system: str, actor: SpawnedActor
) -> list[list[float]]:
    """Play all episodes of a load by agents; return the seconds of their turns."""
    async with AsyncExitStack() as opened:
        agents = []
        for number in range(load.episodes):
            sampling = Sampling(1.0, ANSWER, LONG + ROOM, seed=number)
            sample = Sample(Episode("task", "train", number, {}), number, 0, sampling)
            log = log_at(actor) if load.recorded else None
            episode = await opened.enter_async_context(endpoint.episode(sample, sampling, log))
            agents.append((episode.base_url, episode.api_key))
        plan = {
            "protocol": load.protocol,
            "stream": load.stream,
            "system": system,
            "tokens": ANSWER,
            "turns": load.turns,
            "agents": agents,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(AGENTS)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate(json.dumps(plan).encode())
    if process.returncode:
        raise RuntimeError(f"the agents have ended with status {process.returncode}")
    seconds: list[list[float]] = json.loads(said)
    return seconds


async def at_the_port(
    engine: EngineLoop, episodes: Sequence[Sequence[GenerationRequest]]
) -> list[float]:
    """Send the requests of episodes, all of which begin their second turn together."""

    async def answered(request: GenerationRequest) -> float:
        again = replace(request, request_id=f"direct-{request.request_id}")
        began = time.perf_counter()
        await engine.ask(again)
        return time.perf_counter() - began

    async def later_turns(requests: Sequence[GenerationRequest]) -> list[float]:
        return [await answered(request) for request in requests[1:]]

    await asyncio.gather(*(answered(requests[0]) for requests in episodes))
    found = await asyncio.gather(*map(later_turns, episodes))
    return [seconds for turns in found for seconds in turns]


async def measured_turns(quick: bool) -> dict[str, dict[str, float]]:
    """Return the figures of each load by its name."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(DOCS.glob("*.md"))]
    tokenizer = build_tokenizer(texts, VOCABULARY)
    ids = tokenizer.encode("\n".join(texts))
    systems = {length: tokenizer.decode(ids[:length]) for length in (SHORT, LONG)}
    found = {}
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    async with served(tokenizer) as engine, MeshHost(Supervisor(lambda *_, **__: None)) as host:
        actor = await host.spawn("answers", Echo)
        for load in loads(quick):
            port = TimedPort(engine)
            chat = ChatFormat(tokenizer, [])
            engine.engine.drop_prefixes()
            async with AgentEndpoint(port, chat, len(tokenizer)) as endpoint:
                turns = await at_the_endpoint(endpoint, load, systems[load.context], actor)
            played = [port.turns[name] for name in sorted(port.turns)]
            check_continued(played)
            added = [
                seconds - own
                for episode, sent in zip(turns, played, strict=True)
                for seconds, (_, _, own) in list(zip(episode, sent, strict=True))[1:]
            ]
            engine.engine.drop_prefixes()
            direct = await at_the_port(engine, [[one[0] for one in episode] for episode in played])
            turn = median(seconds for episode in turns for seconds in episode[1:])
            found[load.name] = {
                "added_ms": median(added) * 1000,
                "turn_ms": turn * 1000,
                "port_ms": median(direct) * 1000,
            }
    return found


Played = Sequence[Sequence[tuple[GenerationRequest, GenerationResult, float]]]


def check_continued(played: Played) -> None:
    """Raise RuntimeError where a turn does not continue the ids of the one before it."""
    for turns in played:
        for (before, said, _), (after, _, _) in pairwise(turns):
            known = [*before.prompt_ids, *said.token_ids]
            if list(after.prompt_ids[: len(known)]) != known:
                raise RuntimeError(f"{after.request_id} continues no answer")

"""A world for the controller: all ports of a run as fakes, which can fail in many ways.

A `World` has a policy that writes what the task's expert or a bungler would, sessions of the real
toolbox task on two replicas, and a record of everything that was done, in order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fake_store import Broken, FakeStore
from in_process_player import InProcessPlayer

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, SessionLost
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.pairs import FrozenState, TeacherAnswer, TeacherReply
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import Message, StopReason, Trace
from composer_mesh.services.controller import Controller, Ports
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.episodes.rollout import EpisodeRetries, Rollouts
from composer_mesh.services.replay.pair_stream import PairStream, make_pair_stream
from composer_mesh.services.schedule.groups import ResumeState
from composer_mesh.services.schedule.step_builder import StepBuilder
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.ports import MayTrain, Player
from composer_mesh.tasks.loading import heldout_indices
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

CHANNELS = {
    "sdpo": {"alpha": 0.5},
    "replay": {
        "beta": 0.3,
        "ask": 2,
        "states_per_step": 6,
        "teachers": [{"name": "a", "kind": "builtin"}, {"name": "b", "kind": "builtin"}],
    },
}


class Faults(Protocol):
    """What happens to a session's call at a port: nothing, or it raises."""

    def __call__(self, world: World, port: str, session: str) -> None: ...


class RandomFaults:
    """Every kind of failure that a rollout may meet, at random moments."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rng, self.rate, self.count = random.Random(seed), rate, 0

    def __call__(self, world: World, port: str, session: str) -> None:
        if self.rng.random() >= self.rate:
            return
        self.count += 1
        if port == "generation":
            raise ActorDied("generator-0", "Killed(sig=9)")
        match self.rng.randrange(3):
            case 0:
                world.kill(session)
            case 1:
                raise DeadlineExceeded("environment-0", port, 120.0)
            case _:
                raise Broken(f"fault {self.count}")


@dataclass
class World(FakeStore):
    """All ports of a run but its rollouts and replay, which are the real ones on top of it.

    Environment sessions live in turn on two replicas, and end when theirs is killed.
    """

    task: ToolboxTask
    chat: ChatFormat
    seed: int = 0
    error_rate: float = 0.4
    hang: str = ""
    faults: Faults | None = None
    sessions: dict[str, SyncSession] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    current: dict[str, str] = field(default_factory=dict)
    ghosts: dict[str, SyncSession] = field(default_factory=dict)
    """Sessions that died; what the policy writes to them goes nowhere."""
    deaths: int = 0
    trained: int = 0
    newest: int = 0
    """The version of the generators that have pulled first."""
    served: int = 0
    """The version that all of them have pulled."""
    under_way: int = 0
    """Syncs, and whether nobody may train beside one."""
    exclusive: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    async def pause(self, port: str, session: str = "") -> None:
        """A few turns of the loop for others, then the port's own fate, then the session's."""
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if port == self.broken:
            raise Broken(port)
        if port == self.hang:
            await asyncio.Event().wait()
        if self.faults is not None and session:
            self.faults(self, port, session)

    def kill(self, session: str) -> None:
        """The end of the replica that a session lives on, and of every session there."""
        self.deaths += 1
        home = self.homes[session]
        for one in [name for name, where in self.homes.items() if where == home]:
            if one in self.sessions:
                self.ghosts[one] = self.sessions.pop(one)

    async def generate(self, request: GenerationRequest, _group: str = "") -> GenerationResult:
        session_id = self.current[request.request_id.rpartition("-")[0]]
        versions: list[int] = []
        ids = self.chat.action(
            self._policy(request, (self.sessions | self.ghosts)[session_id].messages)
        )
        reason: StopReason = "stop" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        for _ in ids:
            versions.append(self.newest if request.seed % 2 else self.served)
            if self.rng.random() < 0.05:
                await self.pause("generation")
        await self.pause("generation", session_id)
        return GenerationResult(request.request_id, ids, [-0.5] * len(ids), versions, reason)

    def _policy(self, request: GenerationRequest, messages: list[Message]) -> str:
        rng = random.Random(request.seed)
        wrong = request.temperature > 0 and rng.random() < self.error_rate
        return self.task.corrupted(messages, rng) if wrong else self.task.expert(messages)

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        assert session_id not in self.sessions
        self.homes[session_id] = f"environment-{len(self.homes) % 2}"
        self.current[session_id.partition(".")[0]] = session_id
        self.sessions[session_id] = SyncSession(self.task, episode)
        await self.pause("begin", session_id)
        self.done.append(("begin", session_id))
        return self._called(session_id).messages

    async def step(self, session_id: str, text: str, _turn: object = None) -> StepResult:
        self._lives(session_id)
        await self.pause("step", session_id)
        return self._called(session_id).step(text)

    async def finish(self, session_id: str) -> Outcome:
        self._lives(session_id)
        await self.pause("finish", session_id)
        outcome = self._called(session_id).outcome()
        del self.sessions[session_id]
        return outcome

    def abandon(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    def _lives(self, session_id: str) -> SyncSession:
        if session_id not in self.sessions:
            raise SessionLost(session_id, self.homes[session_id], "Killed(sig=9)")
        return self.sessions[session_id]

    def _called(self, session_id: str) -> SyncSession:
        """The session whose call ends now; its replica may have died under the call."""
        try:
            return self._lives(session_id)
        except SessionLost as lost:
            raise SessionLost(session_id, lost.replica, lost.reason, True) from lost

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self.done.append(("asked", state.state_id.rpartition("/")[0]))
        await self.pause("query")
        text = self.task.expert(state.messages)
        said = assistant_message(text, "call")
        return [TeacherAnswer(name, text, said, 0.01, True, 0.1) for name in "ab"[:n]]

    async def score(self, samples: Sequence[PairSample]) -> list[tuple[float, float]]:
        await self.pause("score")
        return [(-1.0, -2.0)] * len(samples)

    async def train(self, batch: StepBatch) -> dict[str, Any]:
        batch.check_trains(self.trained)
        assert not self.exclusive, f"step {batch.step} may not be trained beside this sync yet"
        self.done.append(("training", batch.step))
        await self.pause("train")
        self.trained += 1
        self.done.append(("trained", batch))
        return {"loss/total": 0.0}

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        """Brings the version that was trained when it began to one of two replicas, then both."""
        assert self.under_way == 0, "two syncs at once"
        self.under_way, self.exclusive, version = 1, True, self.trained
        try:
            await self.pause("publish")
            if on_snapshot is not None:
                self.exclusive = False
                on_snapshot()
            await self.pause("sync")
            self.newest = version
            await self.pause("pull")
            self.served = version
        finally:
            self.under_way, self.exclusive = 0, False
        self.done.append(("served", version))
        return version

    async def save(self, step: int) -> None:
        assert self.under_way == 0
        await self.pause("save")
        self.done.append(("saved", step))

    async def saved(self) -> None:
        self.done.append(("on disk", self.trained))

    def event(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        self.done.append((kind, (actor, detail)))

    def update(self, step: Mapping[str, Any]) -> None:
        self.done.append(("shown", step["step"]))

    def evaluation(self, evaluation: Evaluation) -> None:
        self.done.append(("evaluated", evaluation.step))

    def phase(self, text: str) -> None:
        self.done.append(("phase", text))


MakeWorld = Callable[..., World]


def rollouts_of(world: World, config: Config, player: Player | None = None) -> Rollouts:
    retries = EpisodeRetries(config.supervision, world.add_poisoned, world.event)
    return Rollouts(player or InProcessPlayer(world, world, world.chat), retries)


async def trace_of(world: World, sample: Sample) -> Trace:
    """Play one attempt."""
    played = await InProcessPlayer(world, world, world.chat).play(sample, sample.trace_id)
    return played.trace


async def without_a_thread(work: Callable[[], Any]) -> Any:
    """Blocking work on the loop, so that what happens beside it depends on the seed alone."""
    return work()


def controller_of(
    world: World, config: Config, resume_state: ResumeState | None = None
) -> Controller:
    rollouts = rollouts_of(world, config)
    stream: PairStream | None = None
    if config.replay.on:
        ports_of_pairs = (world, world, world.chat, world, world.waiting_pairs)
        stream = make_pair_stream(config, *ports_of_pairs)
    ports = Ports(
        *(rollouts, stream, world, world, world, world, world.save, world.saved),
        in_thread=without_a_thread,
    )
    batcher = Batcher(config, world.task, world.chat, make_advantages(config.advantage), print)
    heldout = heldout_indices(world.task, config.eval.episodes)
    step_builder = StepBuilder(batcher)
    return Controller(
        config, world.task, step_builder, ports, heldout, resume_state or ResumeState()
    )


async def finished(world: World, config: Config) -> Controller:
    controller = controller_of(world, config)
    await controller.run()
    return controller


def others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}

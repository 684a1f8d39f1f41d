"""Episodes whose rollout worker dies continue at their last turn, in the session that is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from scripted_generation import a_sample

from composer_mesh.actors.environment import EnvironmentActor, UnknownSession
from composer_mesh.actors.rollout_workers.peers import Peer, PeerEnvironments, Peers
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.call_server import LOAD, Caller, Item
from composer_mesh.mesh.call_stream import StreamServer
from composer_mesh.mesh.supervision import ActorDied, RemoteError
from composer_mesh.rollouts.episode import EpisodePlayer, Played
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import (
    ErrorSite,
    ExpertChoices,
    Message,
    Trace,
    Turn,
    trace_to_json,
)

HOME, TURNS = "environment-0", 4
SAMPLE = a_sample(max_context=100_000, experts=True)
SESSION = SAMPLE.trace_id


async def loop_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Letters:
    """A chat format whose ids are bytes."""

    stop_ids = (0,)

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        return list(json.dumps(messages).encode())

    def continuation(self, messages: Sequence[Message], action: Sequence[int]) -> list[int]:
        return list(f"{len(action)}{json.dumps(messages)}".encode())

    def action_text(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


@dataclass
class Boxes:
    """A task process in which each call takes several turns of the loop.

    An action is executed in the middle of its step. While `open` is not set, steps stop there.
    """

    executed: list[tuple[str, str]] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    scored: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    sessions: dict[str, list[str]] = field(default_factory=dict)
    episodes: dict[str, Episode] = field(default_factory=dict)
    rows: list[Episode] = field(default_factory=list)
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    fault: None = None

    async def call(self, endpoint: str, /, session: str, *args: Any) -> Any:
        try:
            return await getattr(self, endpoint)(session, *args)
        except asyncio.CancelledError:
            self.cancelled.append(f"{endpoint} {session}")
            raise

    async def begin(self, session: str, _: Episode) -> list[Message]:
        self.begun.append(session)
        await loop_turns(2)
        self.sessions[session] = []
        return [{"role": "user", "content": "begin"}]

    async def replace_row(self, session: str, episode: Episode) -> None:
        assert session in self.sessions
        self.rows.append(episode)

    async def step(self, session: str, text: str) -> StepResult:
        await loop_turns(2)
        self.executed.append((session, text))
        taken = self.sessions[session]
        taken.append(text)
        await self.open.wait()
        if self.error is not None:
            raise self.error
        await loop_turns(2)
        number = len(taken)
        site = ErrorSite(number - 1, "odd", "key", {"text": text}) if number % 2 else None
        messages: list[Message] = [{"role": "tool", "content": f"{number}: {text[::-1]}"}]
        return StepResult(messages, number == TURNS, site)

    async def finish(self, session: str) -> Outcome:
        await loop_turns(2)
        self.scored.append(session)
        await loop_turns(2)
        said = [{"role": "assistant", "content": text} for text in self.sessions.pop(session)]
        return Outcome(said, 1.0, True)

    async def forget(self, session: str) -> None:
        self.sessions.pop(session, None)
        self.forgotten.set()

    async def close(self) -> None: ...


class Sampler:
    """Samples by a request's name, seed and whole prompt, with the version that is served."""

    def __init__(self) -> None:
        self.version = 3

    async def generate(self, request: GenerationRequest, _group: str) -> GenerationResult:
        await loop_turns(3)
        assert request.experts_from is not None
        prompt = list(request.prompt_ids)
        ids = list(f"{request.request_id} {request.seed % 97} {sum(prompt)}".encode())
        end = len(prompt) + len(ids) - 1
        experts = ExpertChoices(1, 1, 1, bytes(end - request.experts_from))
        logprobs = [-one / 7 for one in ids]
        versions = [self.version] * len(ids)
        return GenerationResult(
            request.request_id, ids, logprobs, versions, "stop", len(prompt) // 2, experts
        )


class Wire(Caller):
    """A worker's calls to an actor's own server; one that is dead sends and hears nothing."""

    load = 0

    def __init__(self, name: str, server: StreamServer) -> None:
        super().__init__()
        self._name, self._server, self.dead = name, server, False
        server.answer_to(name, self._hear, 0.0)

    def post(self, item: Item) -> None:
        if not self.dead:
            self._server.take(self._name, [item])

    def failure(self, endpoint: str, text: str) -> RemoteError:
        return RemoteError(HOME, endpoint, text)

    def lose(self, died: ActorDied) -> None:
        self.end_calls(lambda *_: died)

    async def close(self) -> None: ...

    def _hear(self, items: list[Item]) -> None:
        for item in items:
            if not self.dead and item[1] != LOAD:
                self.settle(item)


class Impatient(EnvironmentActor):
    """An environment whose sessions expire at once."""

    adoption_s: ClassVar[float] = 0.0


def failed(error: BaseException) -> None:
    raise error


class World:
    """One environment, and workers that play one sample in it, one after the other."""

    def __init__(self, actor: EnvironmentActor | None = None) -> None:
        self.boxes, self.sampler = Boxes(), Sampler()
        self.boxes.open.set()
        self.actor = EnvironmentActor() if actor is None else actor
        self.actor._process = self.boxes
        self.server = StreamServer(self.actor._observed_endpoint, failed)
        self.actor._streams = self.server
        self.workers = 0

    def worker(self) -> Worker:
        self.workers += 1
        return Worker(self, f"rollouts-{self.workers}")

    async def call(self, endpoint: str, *args: Any) -> Any:
        return await own_endpoint(self.actor, endpoint)(*args)

    async def resumed(self, dead: Worker, *more: Worker) -> tuple[Trace, int | None]:
        """Play a dead worker's sample to its end; returns the turns from which it continued."""
        left = await self.call("close_calls", dead.name, [SESSION])
        worker = more[0] if more else self.worker()
        played = await worker.play(HOME if SESSION in left else "")
        return played.trace, left.get(SESSION)

    async def is_empty(self) -> bool:
        await loop_turns(5)
        return not (self.actor.in_use() or self.boxes.sessions or self.boxes.episodes)


class Worker:
    """A rollout worker; `kill` ends it like SIGKILL would, seen from the environment."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.wire = name, Wire(name, world.server)
        peers = Peers(lambda *_: self.wire)
        peers.update((Peer(HOME, None),), {})
        self.environments = PeerEnvironments(peers, 60.0)
        chat: Any = Letters()
        self.player = EpisodePlayer(world.sampler, self.environments, chat)
        self.playing: asyncio.Task[Played] | None = None

    async def play(self, home: str = "") -> Played:
        return await self.start(home)

    def start(self, home: str = "") -> asyncio.Task[Played]:
        self.playing = asyncio.create_task(self.player.play(SAMPLE, SESSION, home))
        return self.playing

    async def kill(self) -> None:
        self.wire.dead = True
        assert self.playing is not None
        self.playing.cancel()
        with suppress(asyncio.CancelledError):
            await self.playing


async def undisturbed() -> tuple[Trace, World, int]:
    """An episode without a death, and after how many turns of the loop it has ended."""
    world, number = World(), 0
    playing = world.worker().start()
    while not playing.done():
        await asyncio.sleep(0)
        number += 1
    return (await playing).trace, world, number


async def test_an_episode_is_the_undisturbed_one_wherever_its_workers_die() -> None:
    """At each turn of the loop: between turns, in a generation, in a step and in the scoring."""
    calm, one, length = await undisturbed()
    assert len(calm.turns) == TURNS
    assert len(calm.error_sites) == TURNS / 2
    assert calm.expert_choices() is not None
    continued = set()
    for first in range(length):
        for second in (0, first // 2, 3 * first % length):
            world = World()
            workers = [world.worker() for _ in range(3)]
            home = ""
            for worker, moment in zip(workers, (first, second), strict=False):
                worker.start(home)
                await loop_turns(moment)
                await worker.kill()
                left = await world.call("close_calls", worker.name, [SESSION])
                home = HOME if SESSION in left else ""
            trace, turn = await world.resumed(workers[1], workers[2])
            assert trace == calm
            assert trace_to_json(trace) == trace_to_json(calm)
            if len(world.boxes.begun) == 1:  # no death was in the begin, or after the end
                assert world.boxes.executed == one.boxes.executed
                assert world.boxes.scored == [SESSION]
                continued.add(turn)
            assert await world.is_empty()
    assert continued >= {*range(1, TURNS + 1)}


async def died_in_a_step(world: World) -> Worker:
    """A worker that is dead while its first step is under way, until the boxes open."""
    dead = world.worker()
    world.boxes.open.clear()
    dead.start()
    await loop_turns(30)
    assert len(world.boxes.executed) == 1
    await dead.kill()
    return dead


async def test_turns_keep_the_versions_that_they_were_sampled_with() -> None:
    world = World()
    dead = await died_in_a_step(world)
    world.sampler.version = 4
    world.boxes.open.set()
    trace, turn = await world.resumed(dead)
    assert turn == 1
    assert [one.versions[0] for one in trace.turns] == [3, 4, 4, 4]


async def test_a_step_under_way_outlives_its_worker_and_ends_with_a_live_ones_wish() -> None:
    world = World()
    dead = await died_in_a_step(world)
    assert await world.call("close_calls", dead.name, [SESSION]) == {SESSION: 1}
    assert world.boxes.cancelled == []
    live = world.worker()
    playing = live.start(HOME)
    await loop_turns(10)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await loop_turns(10)
    assert world.boxes.cancelled == [f"step {SESSION}"]
    assert await world.is_empty()


async def test_a_session_that_nobody_wants_is_dropped_with_its_worker() -> None:
    world = World()
    dead = await died_in_a_step(world)
    assert await world.call("close_calls", dead.name, ["another"]) == {}
    assert world.boxes.cancelled == [f"step {SESSION}"]
    assert await world.is_empty()


async def test_a_session_that_nobody_adopts_expires() -> None:
    world = World(Impatient())
    dead = await died_in_a_step(world)
    await world.call("close_calls", dead.name, [SESSION])
    await asyncio.wait_for(world.boxes.forgotten.wait(), 60)
    assert await world.is_empty()
    assert world.boxes.cancelled == [f"step {SESSION}"]
    world.boxes.open.set()
    await world.worker().play(HOME)  # from the start, since it is gone
    assert world.boxes.begun == [SESSION, SESSION]
    assert await world.is_empty()


async def test_a_left_session_is_dropped_where_its_sample_is_given_up() -> None:
    world = World()
    dead = await died_in_a_step(world)
    await world.call("close_calls", dead.name, [SESSION])
    await world.call("forget", SESSION)
    assert await world.is_empty()
    assert await world.call("adopt", SESSION) is None


async def test_a_session_is_adopted_once_and_never_while_its_worker_lives() -> None:
    world = World()
    dead, thief = world.worker(), world.worker()
    dead.start()
    await loop_turns(20)
    assert await thief.environments.adopt(SESSION, HOME) is None
    await dead.kill()
    await world.call("close_calls", dead.name, [SESSION])
    live = world.worker()
    playing = live.start(HOME)
    await loop_turns(2)
    assert await thief.environments.adopt(SESSION, HOME) is None
    assert len((await playing).trace.turns) == TURNS
    assert await thief.environments.adopt(SESSION, "environment-1") is None  # there is none
    assert thief.environments._sessions == live.environments._sessions == {}
    assert await world.is_empty()


async def test_a_worker_that_adopts_gets_the_error_of_the_step_that_was_under_way() -> None:
    world = World()
    dead = await died_in_a_step(world)
    assert await world.call("close_calls", dead.name, [SESSION]) == {SESSION: 1}
    world.boxes.error = ValueError("of the step")
    world.boxes.open.set()
    with pytest.raises(ValueError, match="of the step"):
        await world.worker().play(HOME)
    assert await world.is_empty()


async def test_steps_without_turns_are_not_recorded() -> None:
    """Those of workflows, which are played again."""
    world = World()
    worker = world.worker()
    await worker.environments.begin(SESSION, SAMPLE.episode)
    await worker.environments.step(SESSION, "text")
    assert world.actor._sessions[SESSION].record.turns == []
    await worker.environments.finish(SESSION)
    with pytest.raises(UnknownSession):
        await world.call("step", SESSION, "text")


async def test_an_agents_session_is_adopted_while_its_step_is_under_way() -> None:
    world = World()
    dead = world.worker()
    before = dead.environments
    await before.begin(SESSION, SAMPLE.episode, b"keys")
    world.boxes.open.clear()
    stepping = asyncio.create_task(before.step(SESSION, "play"))
    await loop_turns(10)
    await before.record(SESSION, b"answer")
    before.sent(SESSION, "name", True)
    await loop_turns(10)
    dead.wire.dead = True
    stepping.cancel()
    assert await world.call("close_calls", dead.name, [SESSION]) == {SESSION: 1}
    live = world.worker().environments
    record = await live.adopt(SESSION, HOME)
    assert record is not None
    assert (record.agent, record.turns, record.sent) == (b"keys", [b"answer"], {"name": True})
    moved = replace(SAMPLE.episode, payload={"port": 2})
    assert await live.begin(SESSION, moved) == record.messages
    assert world.boxes.rows == [moved]
    again = asyncio.create_task(live.step(SESSION, "play", again=True))
    await loop_turns(10)
    world.boxes.open.set()
    assert (await again).messages[0]["content"] == "1: yalp"
    assert (await live.step(SESSION, "next")).messages[0]["content"] == "2: txen"
    assert world.boxes.executed == [(SESSION, "play"), (SESSION, "next")]
    await live.finish(SESSION)
    live.sent(SESSION, "late", True)
    await world.call("sent", SESSION, "later", True)  # its session has ended
    assert await world.is_empty()


async def test_an_agents_session_whose_scoring_was_under_way_is_scored_once() -> None:
    for moment in range(12):
        world = World()
        dead = world.worker()
        before = dead.environments
        await before.begin(SESSION, SAMPLE.episode, b"keys")
        await before.step(SESSION, "play")
        finishing = asyncio.create_task(before.finish(SESSION))
        await loop_turns(moment)
        dead.wire.dead = True
        finishing.cancel()
        if not await world.call("close_calls", dead.name, [SESSION]):
            break  # it was finished
        await loop_turns(moment)
        live = world.worker().environments
        assert await live.adopt(SESSION, HOME) is not None
        await live.begin(SESSION, SAMPLE.episode)
        assert (await live.step(SESSION, "play", again=True)).messages[0]["content"] == "1: yalp"
        assert (await live.finish(SESSION)).reward == 1.0
        assert world.boxes.executed == [(SESSION, "play")]
        assert world.boxes.scored == [SESSION]
        assert await world.is_empty()
    assert moment > 5


async def test_a_step_that_no_dead_worker_has_taken_is_taken() -> None:
    world = World()
    environments = world.worker().environments
    await environments.begin(SESSION, SAMPLE.episode, b"keys")
    await environments.step(SESSION, "play", again=True)
    assert world.boxes.executed == [(SESSION, "play")]
    await environments.finish(SESSION)


async def test_the_record_of_an_episode_is_as_large_as_its_packed_ids_and_log_probs() -> None:
    world = World()
    worker = world.worker()
    await worker.environments.begin(SESSION, SAMPLE.episode)
    context, action = list(range(1000)), list(range(300))
    turn = Turn(context, action, [-0.5] * 300, [3] * 300, "stop")
    await worker.environments.step(SESSION, "text", turn)
    (kept,) = world.actor._sessions[SESSION].record.turns
    assert 4 * 1300 + 8 * 300 < len(kept) < 4 * 1300 + 8 * 300 + 300
    await worker.environments.finish(SESSION)

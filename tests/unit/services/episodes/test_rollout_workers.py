"""The rollout workers of a run: who plays what, and what happens when one of them is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import pytest
from fake_host import turns
from fake_pool import Member, Pool

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore
from composer_mesh.services.episodes.rollout import WorkerLost, session_name
from composer_mesh.services.episodes.workers import RolloutPools, RolloutWorkers
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.service import Service


@dataclass
class Worker:
    """A worker's end of the calls; what it plays ends when a test says so, or with its death.

    Its `connect` raises these errors first; `broken` is whom to tell that the calls broke.
    """

    name: str
    broken: Callable[[BaseException], None]
    errors: list[Exception] = field(default_factory=list)
    playing: dict[str, asyncio.Future[str]] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    neighbours: list[Any] = field(default_factory=list)
    load: int = 0

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        if endpoint == "connect":
            self.neighbours.append(args[1])
            if self.errors:
                raise self.errors.pop(0)
            return None
        if endpoint == "score_group":
            return GroupScore({"asked": [float(len(args[1]))]})
        assert endpoint == "play"
        self.homes[args[1]] = args[2]
        playing = self.playing[args[1]] = asyncio.get_running_loop().create_future()
        return await playing

    def finish(self) -> None:
        for session, playing in self.playing.items():
            if not playing.done():
                playing.set_result(session)

    def lose(self, died: ActorDied) -> None:
        for playing in self.playing.values():
            if not playing.done():
                playing.set_exception(type(died)(*died.args))

    async def close(self) -> None: ...


class Impatient(RolloutWorkers):
    """One that does not wait to learn what is left of a dead worker."""

    left_s: ClassVar[float] = 0.0


class World:
    """Pools of two workers, a generator and an environment, and the run's end of their calls.

    `left` is what the environment answers of a dead worker's sessions.
    """

    def __init__(self, player: type[RolloutWorkers] = RolloutWorkers) -> None:
        self.left: dict[str, Any] = {"close_calls": {}}
        self.workers = Pool([Member("rollouts-0"), Member("rollouts-1")])
        self.generators = Pool([Member("generator-0")])
        self.environments = Pool([Member("environment-0", answers=self.left)])
        self.ends: dict[str, Worker] = {}
        self.errors: dict[str, list[Exception]] = {}
        pools = (self.workers, self.generators, self.environments)
        self.player = player(
            RolloutPools(*(cast(Service, pool) for pool in pools)),
            lambda *_, **__: None,
            lockstep=False,
            open_stream=self.open,
        )

    def open(self, name: str, _: Any, broken: Callable[[BaseException], None]) -> Worker:
        self.ends[name] = Worker(name, broken, self.errors.get(name, []))
        return self.ends[name]

    def play(self, group: int, number: int = 0, attempt: int = 1) -> asyncio.Task[Any]:
        sample = a_sample(group, number)
        session = session_name(sample.trace_id, attempt)
        return asyncio.create_task(self.player.play(sample, session))

    def played(self) -> dict[str, list[str]]:
        return {name: sorted(end.playing) for name, end in self.ends.items()}


def a_sample(group: int, number: int = 0) -> Sample:
    episode = Episode("toolbox", "train", group, {})
    return Sample(episode, group, number, Sampling(1.0, 8, 64, 0))


@pytest.fixture
async def world() -> World:
    world = World()
    await turns()
    return world


async def test_a_group_stays_together_and_groups_go_where_the_fewest_are(world: World) -> None:
    plays = [world.play(group, number) for group in range(2) for number in range(3)]
    await turns()
    assert world.played() == {
        f"rollouts-{group}": [f"train-{group:06d}-{number:03d}" for number in range(3)]
        for group in range(2)
    }
    for end in world.ends.values():
        end.finish()
    await asyncio.gather(*plays)
    await world.player.close()


async def test_a_group_is_scored_by_a_worker_and_waits_until_there_is_one(world: World) -> None:
    rollout = FinishedRollout([], [], {})
    world.workers.change()
    scoring = asyncio.create_task(
        world.player.score_group(Episode("toolbox", "train", 0), [rollout] * 3)
    )
    await turns()
    assert not scoring.done()
    world.workers.change("rollouts-2")
    assert (await scoring).values == {"asked": [3.0]}
    await world.player.close()


async def test_the_attempts_of_a_dead_worker_fail_and_the_others_hang_up_on_it(
    world: World,
) -> None:
    play = world.play(0)
    await turns()
    world.workers.change("rollouts-1")
    with pytest.raises(ActorDied, match="rollouts-0 died: rollouts-0 was killed"):
        await play
    await turns()
    assert world.generators.asked == [("close_calls", "rollouts-0")]
    environment = world.environments.replicas[0]
    assert environment.calls == [("close_calls", "rollouts-0", ["train-000000-000"])]
    again = world.play(0, attempt=2)
    await turns()
    assert world.ends["rollouts-1"].homes == {"train-000000-000.2": ""}
    world.ends["rollouts-1"].finish()
    assert await again == "train-000000-000.2"
    await world.player.close()


async def test_an_attempt_continues_in_the_session_that_outlived_its_worker(world: World) -> None:
    world.left["close_calls"] = {"train-000000-000": 7}
    with world.player.announce([a_sample(0)])[0]:
        play = world.play(0)
        await turns()
        world.workers.change("rollouts-1")
        with pytest.raises(WorkerLost, match="rollouts-0 died: rollouts-0 was killed") as lost:
            await play
        assert (lost.value.turns, lost.value.actor) == (7, "rollouts-0")
        again = world.play(0, attempt=2)
        await turns()
        assert world.ends["rollouts-1"].homes == {"train-000000-000": "environment-0"}
        world.workers.change("rollouts-2")  # once more, in the same session
        with pytest.raises(WorkerLost):
            await again
        last = world.play(0, attempt=3)
        await turns()
        assert world.ends["rollouts-2"].homes == {"train-000000-000": "environment-0"}
        world.ends["rollouts-2"].finish()
        assert await last == "train-000000-000"
    await turns()
    assert world.environments.asked == []  # nothing was left to drop
    await world.player.close()


async def test_an_attempt_after_another_failure_begins_in_a_session_of_its_own(
    world: World,
) -> None:
    world.left["close_calls"] = {"train-000000-000": 7}
    for attempt, worker in ((1, "rollouts-0"), (2, "rollouts-1")):
        play = world.play(0, attempt=attempt)
        await turns()
        if attempt == 1:
            world.workers.change("rollouts-1")
        else:
            world.ends[worker].playing["train-000000-000"].set_exception(ValueError("of the task"))
        with pytest.raises((WorkerLost, ValueError)):
            await play
    play = world.play(0, attempt=3)
    await turns()
    assert world.ends["rollouts-1"].homes["train-000000-000.3"] == ""
    world.ends["rollouts-1"].finish()
    await play
    await world.player.close()


async def test_a_session_of_a_sample_that_is_given_up_or_cancelled_is_dropped(
    world: World,
) -> None:
    world.workers.change("rollouts-0")
    await turns()
    world.left["close_calls"] = {"train-000000-000": 7}
    with world.player.announce([a_sample(0)])[0]:
        play = world.play(0)
        await turns()
        world.workers.change()
        with pytest.raises(WorkerLost):
            await play
        waiting = world.play(0, attempt=2)  # for a worker
        await turns()
        waiting.cancel()
        await turns()
        assert world.environments.asked == []
    await turns()
    assert world.environments.asked == [("forget", "train-000000-000")]
    await world.player.close()


async def test_a_session_is_dropped_whose_sample_is_cancelled_before_it_is_known_to_be_left(
    world: World,
) -> None:
    answer = world.left["close_calls"] = asyncio.get_running_loop().create_future()
    play = world.play(0)
    await turns()
    world.workers.change("rollouts-1")
    await turns()
    assert not play.done()
    play.cancel()
    await turns()
    answer.set_result({"train-000000-000": 7})
    await turns()
    assert world.environments.asked == [("forget", "train-000000-000")]
    await world.player.close()


async def test_a_session_is_dropped_whose_next_worker_may_not_have_begun_with_it(
    world: World,
) -> None:
    world.left["close_calls"] = {"train-000000-000": 7}
    play = world.play(0)
    await turns()
    world.workers.change("rollouts-1")
    with pytest.raises(WorkerLost):
        await play
    again = world.play(0, attempt=2)
    await turns()
    again.cancel()
    await turns()
    assert world.environments.asked == [("forget", "train-000000-000")]
    await world.player.close()


async def test_an_attempt_begins_anew_where_environments_do_not_say_what_is_left_or_fail() -> None:
    world = World(Impatient)
    await turns()
    answer = world.left["close_calls"] = asyncio.get_running_loop().create_future()
    play = world.play(0)
    await turns()
    world.workers.change("rollouts-1")
    with pytest.raises(ActorDied) as died:
        await play
    assert not isinstance(died.value, WorkerLost)
    answer.set_result({"train-000000-000": 7})
    await turns()
    assert world.environments.asked == [("forget", "train-000000-000")]
    world.left["close_calls"] = ActorDied("environment-0", "killed")
    play = world.play(0, attempt=2)
    await turns()
    world.workers.change("rollouts-2")
    with pytest.raises(ActorDied) as died:
        await play
    assert not isinstance(died.value, WorkerLost)
    await world.player.close()


async def test_the_death_of_another_actor_is_not_waited_for(world: World) -> None:
    play = world.play(0)
    await turns()
    died = ActorDied("generator-0", "Killed(sig=9)")
    world.ends["rollouts-0"].playing["train-000000-000"].set_exception(died)
    with pytest.raises(ActorDied, match="generator-0 died"):
        await play
    await world.player.close()


async def test_a_draining_worker_ends_what_it_plays_and_gets_nothing_new(world: World) -> None:
    first = world.play(0)
    await turns()
    world.workers.change("rollouts-0", "rollouts-1", draining=("rollouts-0",))
    second = world.play(0, 1)
    await turns()
    assert sorted(world.ends["rollouts-1"].playing) == ["train-000000-001"]
    for end in world.ends.values():
        end.finish()
    assert await asyncio.gather(first, second) == ["train-000000-000", "train-000000-001"]
    await world.player.close()


async def test_workers_hear_of_each_change_of_those_that_they_call(world: World) -> None:
    world.generators.change("generator-0", "generator-1")
    await turns()
    world.generators.change("generator-1")
    await turns()
    for end in world.ends.values():
        names = [[peer.name for peer in one.generators] for one in end.neighbours]
        assert names == [["generator-0"], ["generator-0", "generator-1"], ["generator-1"]]
        assert end.neighbours[-1].gone == {"generator-0": "generator-0 was killed"}
    await world.player.close()


async def test_nothing_is_played_once_a_pool_has_nothing_left(world: World) -> None:
    play = world.play(0)
    await turns()
    world.generators.give_up()
    for one in (play, world.play(1)):
        with pytest.raises(NoReplicaLeft, match="given up"):
            await one
    await world.player.close()


async def test_a_worker_whose_answers_can_no_longer_be_read_is_replaced(world: World) -> None:
    play = world.play(0)
    await turns()
    world.ends["rollouts-0"].broken(MemoryError("no more"))
    with pytest.raises(ActorDied, match="rollouts-0 died"):
        await play
    assert world.workers.lost == [
        "rollouts-0: its answers can no longer be read: MemoryError: no more"
    ]
    await world.player.close()


async def test_a_worker_whose_connection_failed_once_is_connected_again_before_it_plays(
    world: World,
) -> None:
    world.errors["rollouts-2"] = [RuntimeError("no")]
    world.workers.change("rollouts-2")
    play = world.play(0)
    await turns()
    assert len(world.ends["rollouts-2"].neighbours) == 2
    world.ends["rollouts-2"].finish()
    assert await play == "train-000000-000"
    assert not world.workers.lost
    await world.player.close()


async def test_a_worker_that_cannot_be_connected_is_replaced_and_plays_nothing(
    world: World,
) -> None:
    world.errors["rollouts-2"] = [RuntimeError("no"), RuntimeError("never")]
    world.workers.change("rollouts-2", "rollouts-3")
    play = world.play(0)
    await turns()
    assert world.workers.lost == ["rollouts-2: its connect failed: RuntimeError: never"]
    assert not world.ends["rollouts-2"].playing
    world.ends["rollouts-3"].finish()
    assert await play == "train-000000-000"
    await world.player.close()


async def test_a_sample_waits_for_a_worker_that_is_still_starting(world: World) -> None:
    world.workers.change()
    play = world.play(0)
    await turns()
    world.workers.change("rollouts-0.2")
    await turns()
    world.ends["rollouts-0.2"].finish()
    assert await play == "train-000000-000"
    await world.player.close()

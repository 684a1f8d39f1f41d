"""The ranks of a server's trainer: called together, replaced together, and their caller is told."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_ranks import FakeHost

from composer_mesh.actors.models.ranks import RanksLost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded
from composer_mesh.plugins.tinker.models.messages import ModelNotOpen
from composer_mesh.plugins.tinker.served_trainer import ServedTrainerActor
from composer_mesh.plugins.tinker.server.backend import BackendLost
from composer_mesh.plugins.tinker.server.mesh_backend import ServedRanks
from composer_mesh.services.pool.dispatch import NoReplicaLeft
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.rank_processes import RankProcesses


class World:
    """A host of fakes, the ranks on it, and what was recorded."""

    def __init__(self, build_config: Any) -> None:
        self.host, self.events = FakeHost(), list[tuple[str, str]]()
        self._build_config = build_config
        self.all: list[ServedRanks] = []

    def _record(self, kind: str, actor: str, _detail: str, /, **_: Any) -> None:
        self.events.append((kind, actor))

    async def ranks(self, size: int, restarts: int = 2, dying: str = "") -> ServedRanks:
        """Return ranks that have loaded; the one that is `dying` does so when it should."""
        supervision = {"restarts": restarts, "backoff_s": 0.001}
        config = self._build_config(trainer={"ranks": size}, supervision=supervision)
        processes = RankProcesses(
            ServedTrainerActor,
            config,
            self.host,  # type: ignore[arg-type]
            lambda _: ProcessPlacement(),
            news_s=0.0,
        )
        await processes.start()
        if dying:
            self.host.named(dying).errors["load"] = ActorDied(dying, "killed")
        ranks = ServedRanks(config, processes, self._record)
        await ranks.load()
        self.all.append(ranks)
        return ranks

    def heard(self, name: str) -> list[str]:
        return [call[0] for call in self.host.named(name).heard]

    async def calls(self, name: str, endpoint: str) -> None:
        """Wait until a rank is called."""
        while endpoint not in self.heard(name):  # noqa: ASYNC110  the fakes tell nobody
            await asyncio.sleep(0)


@pytest.fixture
async def world(build_config: Any) -> AsyncIterator[World]:
    found = World(build_config)
    yield found
    for one in found.all:
        await one.end()


async def test_all_ranks_are_called(world: World) -> None:
    ranks = await world.ranks(2)
    assert await ranks.call("execute", [1]) == 0
    for name in ("trainer-0", "trainer-1"):
        assert world.heard(name) == ["connect", "load", "execute"]


async def test_calls_reach_all_ranks_in_one_order(world: World) -> None:
    ranks = await world.ranks(2)
    slow = world.host.named("trainer-0")
    slow.hangs.add("execute")
    first = asyncio.create_task(ranks.call("execute"))
    await world.calls("trainer-1", "execute")
    second = asyncio.create_task(ranks.call("open"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert "open" not in world.heard("trainer-1")
    slow.die()
    with pytest.raises(BackendLost):
        await first
    assert await second == 0


@pytest.mark.parametrize("dead", ["trainer-0", "trainer-1"])
async def test_the_death_of_any_rank_in_a_call_replaces_all_and_is_told_once(
    world: World, dead: str
) -> None:
    ranks = await world.ranks(2)
    for one in world.host.actors:
        one.hangs.add("execute")
    calling = asyncio.create_task(ranks.call("execute"))
    await world.calls(dead, "execute")
    world.host.named(dead).die()
    with pytest.raises(BackendLost, match=f"{dead} died"):
        await calling
    assert await ranks.call("open") == 0
    for name in ("trainer-0.2", "trainer-1.2"):
        assert world.heard(name) == ["connect", "load", "open"]
    assert ranks.restarts == 1
    assert world.events == [("actor_restarted", "trainer-0.2")]


async def test_ranks_of_which_one_dies_while_it_loads_are_replaced(world: World) -> None:
    ranks = await world.ranks(2, dying="trainer-1")
    assert await ranks.call("open") == 0
    assert world.heard("trainer-1.2") == ["connect", "load", "open"]
    assert world.events == [("actor_restarted", "trainer-0.2")]


async def test_a_death_between_calls_is_told_to_the_next_one(world: World) -> None:
    ranks = await world.ranks(2)
    world.host.named("trainer-1").die()
    while not ranks.restarts:  # noqa: ASYNC110  the fakes tell nobody
        await asyncio.sleep(0.001)
    with pytest.raises(BackendLost, match="trainer-1 died"):
        await ranks.call("close")
    assert world.heard("trainer-0.2") == ["connect", "load"]
    assert await ranks.call("close") == 0


@pytest.mark.parametrize("size", [1, 2])
async def test_a_rank_without_an_answer_in_time_is_replaced(world: World, size: int) -> None:
    ranks = await world.ranks(size)
    late = world.host.actors[-1]
    late.errors["execute"] = DeadlineExceeded(late.name, "execute", 1.0)
    with pytest.raises(BackendLost, match="no answer within 1 s"):
        await ranks.call("execute")
    assert late.death.done()
    assert await ranks.call("execute") == 0
    assert ranks.restarts == 1


async def test_an_error_of_one_rank_ends_the_wait_of_the_others(world: World) -> None:
    ranks = await world.ranks(2)
    world.host.named("trainer-0").hangs.add("execute")
    failed = world.host.named("trainer-1")
    failed.errors["execute"] = RanksLost(1, "out of memory")
    with pytest.raises(BackendLost, match="rank 1 failed while others waited"):
        await ranks.call("execute")
    assert failed.death.done()
    assert await ranks.call("execute") == 0


async def test_a_model_that_is_not_open_replaces_nothing(world: World) -> None:
    ranks = await world.ranks(2)
    for one in world.host.actors:
        one.errors["execute"] = ModelNotOpen("a", 3, -1)
    with pytest.raises(BackendLost, match="a is requested at position 3"):
        await ranks.call("execute")
    assert await ranks.call("execute") == 0
    assert ranks.restarts == 0


async def test_an_error_of_the_only_rank_is_its_callers(world: World) -> None:
    ranks = await world.ranks(1)
    world.host.named("trainer").errors["close"] = OSError("no space left")
    with pytest.raises(OSError, match="no space left"):
        await ranks.call("close")
    assert await ranks.call("close") == 0
    assert ranks.restarts == 0


async def test_ranks_that_cannot_start_are_given_up(world: World) -> None:
    ranks = await world.ranks(2, restarts=2)
    world.host.refused = {f"trainer-1.{number}" for number in range(2, 9)}
    world.host.named("trainer-0").die()
    with pytest.raises(BackendLost):
        await ranks.call("execute")
    for _ in range(2):
        with pytest.raises(NoReplicaLeft):
            await ranks.call("execute")
    assert world.events == [("actor_given_up", "trainer-0")]
    assert world.host.actors == []

"""The trainer's processes: named by generation, replaced together; whose death explains what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.mesh.supervision import ActorDied, FaultPolicy
from composer_mesh.services.trainer_ranks import TrainerRanks


class FakeRank:
    """Loads as version 3 from a checkpoint and as version 0 without one."""

    def __init__(self, name: str) -> None:
        self.name, self.heard = name, list[tuple[Any, ...]]()
        self.death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()

    async def call(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        self.heard.append((endpoint, *args))
        return 3 if endpoint == "load" and args[-1] else 0

    def die(self) -> None:
        self.death.set_result(ActorDied(self.name, "killed"))


class FakeHost:
    """Starts fakes, but none of the names in `refused`."""

    def __init__(self) -> None:
        self.actors: list[FakeRank] = []
        self.refused: set[str] = set()

    async def spawn(self, name: str, _kind: Any, *, env: Any, policy: FaultPolicy) -> FakeRank:
        assert policy is FaultPolicy.OWNER
        assert name not in [actor.name for actor in self.actors]
        if name in self.refused:
            raise ActorDied(name, "no memory")
        self.actors.append(rank := FakeRank(name))
        return rank

    async def stop(self, rank: FakeRank) -> None:
        self.actors.remove(rank)

    def lost(self, rank: FakeRank, _reason: str) -> None:
        if not rank.death.done():
            rank.die()

    def named(self, name: str) -> FakeRank:
        return next(actor for actor in self.actors if actor.name == name)


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


async def started(host: FakeHost, build_config: Any, size: int = 2) -> TrainerRanks:
    ranks = TrainerRanks(build_config(trainer={"ranks": size}), host, lambda _: {})  # type: ignore[arg-type]
    await ranks.start()
    assert await ranks.load(Path("policy")) == 0
    return ranks


async def test_all_ranks_are_replaced_and_load_the_checkpoint_of_the_same_policy(
    host: FakeHost, build_config: Any
) -> None:
    ranks = await started(host, build_config)
    assert ranks.names() == ["trainer-0", "trainer-1"]
    assert await ranks.begin_again(Path("step-3")) == 3
    assert [actor.name for actor in host.actors] == ranks.names() == ["trainer-0.2", "trainer-1.2"]
    for actor in host.actors:
        connect, load = actor.heard
        assert connect[0] == "connect"
        assert load[2:] == (Path("policy"), Path("step-3"))


async def test_one_rank_meets_nobody(host: FakeHost, build_config: Any) -> None:
    ranks = await started(host, build_config, size=1)
    assert ranks.names() == ["trainer"]
    assert [call[0] for call in ranks.first.heard] == ["load"]  # type: ignore[attr-defined]


async def test_ranks_that_could_not_all_start_leave_none_behind(
    host: FakeHost, build_config: Any
) -> None:
    ranks = await started(host, build_config)
    host.refused = {"trainer-1.2"}
    with pytest.raises(ActorDied, match="no memory"):
        await ranks.begin_again(None)
    assert host.actors == []
    assert ranks.names() == ["trainer-0.2", "trainer-1.2"]
    assert await ranks.begin_again(None) == 0
    assert ranks.names() == ["trainer-0.3", "trainer-1.3"]


async def test_work_ends_with_the_death_of_any_rank(host: FakeHost, build_config: Any) -> None:
    ranks = await started(host, build_config)
    work = asyncio.create_task(ranks.guard(asyncio.sleep(3600)))
    await asyncio.sleep(0)
    host.named("trainer-1").die()
    with pytest.raises(ActorDied, match="trainer-1 died: killed"):
        await work


async def test_an_error_elsewhere_is_explained_by_a_death_that_is_known_a_moment_later(
    host: FakeHost, build_config: Any
) -> None:
    ranks = await started(host, build_config)
    judging = asyncio.create_task(ranks.cause_of(RuntimeError("Connection reset by peer")))
    await asyncio.sleep(0)
    host.named("trainer-1").die()
    assert str(await judging) == "trainer-1 died: killed"


async def test_the_death_of_another_actor_stays_what_it_is(
    host: FakeHost, build_config: Any
) -> None:
    ranks = await started(host, build_config)
    other = ActorDied("generator-0", "killed")
    assert await ranks.cause_of(other) is other
    assert ranks.died() is None


async def test_a_death_that_only_a_caller_heard_of_is_known_to_all_afterwards(
    host: FakeHost, build_config: Any
) -> None:
    ranks = await started(host, build_config)
    await ranks.cause_of(ActorDied("trainer-0", "gone"))
    assert ranks.died() is not None

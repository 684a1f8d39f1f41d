"""The trainer's processes: named by generation, replaced together; whose death explains what."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_ranks import MEETING, FakeHost

from composer_mesh.actors.models.ranks import Division
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.planning.placement_solver import NoCapacity
from composer_mesh.services.pool.process_placement import ProcessPlacement
from composer_mesh.services.training.rank_processes import TrainerRanks


@pytest.fixture
def host() -> FakeHost:
    return FakeHost()


async def started(host: FakeHost, build_config: Any, size: int = 2) -> TrainerRanks:
    ranks = TrainerRanks(build_config(trainer={"ranks": size}), host, lambda _: ProcessPlacement())  # type: ignore[arg-type]
    await ranks.start()
    assert await ranks.load(Path("policy")) == 0
    return ranks


async def test_all_ranks_are_replaced_and_load_the_checkpoint_of_the_same_policy(
    host: FakeHost, build_config: Any
) -> None:
    ranks = await started(host, build_config)
    assert ranks.names() == ["trainer-0", "trainer-1"]
    assert await ranks.restart_from(Path("step-3")) == 3
    assert [actor.name for actor in host.actors] == ranks.names() == ["trainer-0.2", "trainer-1.2"]
    for actor in host.actors:
        connect, load = actor.heard
        assert connect[0] == "connect"
        assert load[2:] == (Path("policy"), Path("step-3"))


async def test_ranks_hear_how_they_are_divided_while_they_can_meet(
    host: FakeHost, build_config: Any
) -> None:
    trainer = {"ranks": 4, "context_parallel": 2, "expert_parallel": 4, "packing": True}
    ranks = TrainerRanks(build_config(trainer=trainer), host, lambda _: ProcessPlacement())  # type: ignore[arg-type]
    await ranks.start()
    await ranks.load(Path("policy"))
    for actor in host.actors:
        assert actor.heard[0][-1] == Division(context=2, experts=4)


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
        await ranks.restart_from(None)
    assert host.actors == []
    assert ranks.names() == ["trainer-0.2", "trainer-1.2"]
    assert await ranks.restart_from(None) == 0
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


def on(hosts: str) -> Any:
    """Seats on these hosts, in the order of ranks."""
    return lambda rank: ProcessPlacement(hosts[rank], {"RANK": str(rank)})


async def test_ranks_of_this_machine_meet_by_a_file_and_sum_over_loopback(
    host: FakeHost, build_config: Any
) -> None:
    await started(host, build_config)
    assert host.told == 2 * [{"on": None, "GLOO_SOCKET_IFNAME": "lo"}]
    (rendezvous,) = {actor.heard[0][3] for actor in host.actors}
    assert isinstance(rendezvous, Path)


async def test_ranks_that_are_all_on_another_host_meet_on_its_loopback(
    host: FakeHost, build_config: Any
) -> None:
    ranks = TrainerRanks(build_config(trainer={"ranks": 2}), host, on("aa"))  # type: ignore[arg-type]
    await ranks.start()
    await ranks.load(Path("policy"))
    assert [told["GLOO_SOCKET_IFNAME"] for told in host.told] == ["lo", "lo"]
    opened = host.actors[0].heard[0]
    assert (opened[0], opened[2]) == ("open_rendezvous", False)
    assert {actor.heard[-2][3] for actor in host.actors} == {MEETING}


async def test_ranks_of_several_hosts_meet_where_the_first_one_listens(
    host: FakeHost, build_config: Any
) -> None:
    ranks = TrainerRanks(build_config(trainer={"ranks": 2}), host, on("ab"))  # type: ignore[arg-type]
    await ranks.start()
    await ranks.load(Path("policy"))
    assert host.told == [{"on": "a", "RANK": "0"}, {"on": "b", "RANK": "1"}]
    first, second = host.actors
    assert [call[0] for call in first.heard] == ["open_rendezvous", "connect", "load"]
    assert [call[0] for call in second.heard] == ["connect", "load"]
    assert first.heard[0][2] is True
    assert first.heard[1][1:4] == (0, 2, MEETING)
    assert second.heard[0][1:4] == (1, 2, MEETING)


async def test_a_rank_that_starts_on_a_lost_host_has_died_as_any_other(
    host: FakeHost, build_config: Any
) -> None:
    ranks = TrainerRanks(build_config(trainer={"ranks": 2}), host, on("ab"))  # type: ignore[arg-type]
    host.lost_host = "b"
    with pytest.raises(ActorDied, match="trainer-1 died: host b cannot be used: it gave no sign"):
        await ranks.start()
    assert host.actors == []


class Full:
    """No host has room for rank 1 until `free`; then a host b has it."""

    def __init__(self) -> None:
        self.free, self.asked_often = asyncio.Event(), asyncio.Event()
        self.asked = 0

    def __call__(self, rank: int) -> ProcessPlacement:
        self.asked += 1
        if self.asked > 9:
            self.asked_often.set()
        if rank and not self.free.is_set():
            raise NoCapacity("no host has room for trainer-1")
        return ProcessPlacement("ab"[rank], {})


async def test_ranks_wait_for_a_host_with_room_and_say_so_once(
    host: FakeHost, build_config: Any
) -> None:
    placements, two = Full(), build_config(trainer={"ranks": 2})
    ranks = TrainerRanks(two, host, placements, look_s=0.0)  # type: ignore[arg-type]
    starting = asyncio.create_task(ranks.start())
    await placements.asked_often.wait()
    assert host.notes == [("waits_for_capacity", "trainer-0", "no host has room for trainer-1")]
    placements.free.set()
    await starting
    assert [told["on"] for told in host.told] == ["a", "b"]


async def test_the_wait_for_a_host_has_an_end(host: FakeHost, build_config: Any) -> None:
    host.capacity_wait_s = 1e-9
    ranks = TrainerRanks(build_config(trainer={"ranks": 2}), host, Full())  # type: ignore[arg-type]
    with pytest.raises(NoCapacity):
        await ranks.start()

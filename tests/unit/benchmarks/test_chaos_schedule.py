"""The faults of a chaos run: which, how many, when. Pure, so it repeats."""

from __future__ import annotations

import importlib
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

chaos: Any = importlib.import_module("chaos_schedule")

FULL, SEEDS = 66, range(8)


@pytest.fixture(params=SEEDS)
def plan(request: pytest.FixtureRequest) -> list[Any]:
    planned: list[Any] = chaos.schedule(request.param, FULL)
    return planned


def test_a_seed_gives_one_schedule() -> None:
    assert chaos.schedule(3, FULL) == chaos.schedule(3, FULL)
    assert chaos.schedule(3, FULL) != chaos.schedule(4, FULL)


def test_it_has_as_many_faults_as_asked_for(plan: list[Any]) -> None:
    assert len(plan) == FULL
    assert [one.number for one in plan] == list(range(FULL))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [10, 16, FULL])
def test_every_kind_and_every_fault_is_met(seed: int, count: int) -> None:
    plan = chaos.schedule(seed, count)
    assert len(plan) == count
    assert {one.kind for one in plan} == set(chaos.KINDS)
    assert {one.fault for one in plan} == set(chaos.Fault)


def test_a_full_schedule_has_nearly_every_pair_of_kind_and_fault(plan: list[Any]) -> None:
    pairs = {(one.kind, one.fault) for one in plan}
    assert len(pairs) >= len(chaos.KINDS) * len(chaos.Fault) - 4


def test_moments_follow_each_other_and_leave_the_end_of_the_run_in_peace(plan: list[Any]) -> None:
    assert all(one.at <= after.at for one, after in pairwise(plan))
    assert plan[0].at >= chaos.FIRST
    assert plan[-1].at <= chaos.LAST


def test_a_burst_falls_at_one_moment_within_its_time(plan: list[Any]) -> None:
    bursts = Counter(one.burst for one in plan if one.burst is not None)
    assert len(bursts) == FULL // chaos.EVERY_BURST
    assert all(size >= 2 for size in bursts.values())
    for burst in bursts:
        members = [one for one in plan if one.burst == burst]
        assert len({one.at for one in members}) == 1
        assert all(one.delay_s <= chaos.BURST_S for one in members)


def test_one_burst_ends_two_generators_at_once(plan: list[Any]) -> None:
    bursts = {one.burst for one in plan if one.burst is not None}
    members = [[one for one in plan if one.burst == burst] for burst in bursts]
    assert any(
        {(one.kind, one.place, one.fault) for one in burst}
        == {("generator", 0, chaos.Fault.KILL), ("generator", 1, chaos.Fault.KILL)}
        for burst in members
    )


def test_weight_syncs_are_hit_in_the_endpoint_of_each_side(plan: list[Any]) -> None:
    hit = [one for one in plan if one.endpoint is not None]
    assert len(hit) == FULL // chaos.EVERY_SYNC
    assert all(chaos.SYNC_ENDPOINTS[one.kind] == one.endpoint for one in hit)
    assert len({(one.kind, one.fault) for one in hit}) == len(hit)


def test_only_the_kinds_that_a_run_has_are_hit() -> None:
    plan = chaos.schedule(0, 12, ["trainer", "environment"])
    assert {one.kind for one in plan} == {"trainer", "environment"}


def test_a_schedule_without_faults_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 0, but a schedule has 1 fault or more"):
        chaos.schedule(0, 0)

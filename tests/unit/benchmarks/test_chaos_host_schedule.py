"""The faults of a run's hosts: which, how many, when. Pure, so it repeats."""

from __future__ import annotations

import importlib
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

hosts: Any = importlib.import_module("chaos_schedule")

SEEDS = range(8)


def test_a_seed_gives_one_schedule() -> None:
    assert hosts.host_schedule(3, 6) == hosts.host_schedule(3, 6)
    assert hosts.host_schedule(3, 6) != hosts.host_schedule(4, 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_three_faults_are_one_of_each_that_ends_a_host(seed: int) -> None:
    plan = hosts.host_schedule(seed, 3)
    assert sorted(one.fault for one in plan) == sorted(hosts.ENDS_THE_HOST)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [4, 6, 9])
def test_every_sort_is_met_and_none_much_more_often(seed: int, count: int) -> None:
    met = Counter(one.fault for one in hosts.host_schedule(seed, count))
    assert set(met) == set(hosts.HostFault)
    assert sum(met.values()) == count
    assert max(met.values()) - min(met.values()) <= 1


def test_moments_follow_each_other_and_leave_the_end_of_the_run_in_peace() -> None:
    plan = hosts.host_schedule(0, 6)
    assert all(one.at < after.at for one, after in pairwise(plan))
    assert plan[0].at >= hosts.FIRST_OF_HOSTS
    assert plan[-1].at <= hosts.LAST_OF_HOSTS


def test_a_schedule_without_faults_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 0, but a schedule has 1 fault or more"):
        hosts.host_schedule(0, 0)

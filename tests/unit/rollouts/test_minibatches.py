"""The parts of a step's batch that its updates train."""

from __future__ import annotations

from dataclasses import replace

import hinted
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.batches import Skipped, StepBatch
from composer_mesh.rollouts.step_plan import minibatches, plan_step, plan_views

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=9)


def batch_of(groups: list[int], views: int = 0, pairs: int = 0) -> StepBatch:
    """A batch of groups of these sizes, every third sample with views."""
    count = sum(groups)
    owners = [f"t{number}" for number in range(count) if number % 3 == 0][:views]
    found = hinted.batch(
        [10 + number % 7 for number in range(count)],
        [hinted.view(owner, turn) for turn, owner in enumerate(owners)],
        [8] * pairs,
    )
    ids = [group for group, size in enumerate(groups) for _ in range(size)]
    samples = [replace(one, group_id=ids[at]) for at, one in enumerate(found.samples)]
    return replace(found, samples=samples, skipped=Skipped(3, 17))


@given(SIZES, st.integers(1, 12), st.integers(0, 9), st.integers(0, 9))
def test_each_group_view_and_pair_is_in_one_part_and_none_is_empty(
    groups: list[int], updates: int, views: int, pairs: int
) -> None:
    batch = batch_of(groups, views, pairs)
    parts = minibatches(batch, updates)
    assert len(parts) == min(updates, len(groups))
    assert [sample for part in parts for sample in part.samples] == batch.samples
    assert [pair for part in parts for pair in part.pairs] == batch.pairs
    assert sum(len(part.views) for part in parts) == len(batch.views)
    assert sum(part.skipped.sequences for part in parts) == 3
    for part in parts:
        names = {sample.trace_id for sample in part.samples}
        assert part.samples
        assert {view.trace_id for view in part.views} <= names
    owners = [{sample.group_id for sample in part.samples} for part in parts]
    assert sum(len(own) for own in owners) == len(groups)


def test_parts_of_equal_groups_are_equal() -> None:
    parts = minibatches(batch_of([4] * 8, pairs=6), 4)
    assert [len(part.samples) for part in parts] == [8] * 4
    assert [len(part.pairs) for part in parts] == [1, 2, 1, 2]


def test_one_update_is_the_batch_and_an_epoch_repeats_all() -> None:
    batch = batch_of([2, 2], pairs=1)
    assert minibatches(batch, 1) == [batch]
    assert minibatches(batch, 1, 3) == [batch] * 3
    assert minibatches(batch, 2, 2) == minibatches(batch, 2) * 2


def test_a_batch_without_samples_is_one_part() -> None:
    batch = hinted.batch([], [], [8, 9])
    assert minibatches(batch, 4) == [batch]


@given(SIZES, st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(30, 80))
def test_views_are_numbered_alike_by_those_who_train_and_those_who_teach(
    groups: list[int], updates: int, epochs: int, ranks: int, budget: int
) -> None:
    batch = batch_of(groups, 9)
    parts = minibatches(batch, updates, epochs)
    seen = plan_views(batch, parts, budget, ranks, packed=False, sharing="off")
    first = 0
    for part in parts:
        plans = plan_step(part, budget, ranks)
        for rank, plan in enumerate(plans):
            for index, microbatch in enumerate(plan.microbatches):
                views = [part.views[view] for view in microbatch.views]
                told = seen[rank].microbatches[first + index].views
                assert [batch.views[view] for view in told] == views
        first += max(len(plan.microbatches) for plan in plans)
    assert {len(plan.microbatches) for plan in seen} == {first}


@pytest.mark.parametrize("updates", [1, 2])
def test_without_division_the_numbers_are_those_of_the_step(updates: int) -> None:
    batch = batch_of([3], 2)
    parts = minibatches(batch, updates)
    (seen,) = plan_views(batch, parts, 30, 1, packed=False, sharing="off")
    (plan,) = plan_step(batch, 30)
    assert [one.views for one in seen.microbatches] == [one.views for one in plan.microbatches]

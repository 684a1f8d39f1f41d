"""A step's plan covers everything exactly once, however many ranks and teachers there are.

The parts of a step's batch that its updates train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import hinted
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import Skipped, StepBatch
from composer_mesh.rollouts.packing import packed_rows
from composer_mesh.rollouts.prefix_tree import PrefixTree
from composer_mesh.rollouts.step_plan import (
    RankPlan,
    minibatches,
    pair_groups,
    pair_sides,
    pair_tokens,
    plan_step,
    plan_views,
    rounds_of,
    split_views,
    spread,
    teacher_groups,
    teacher_rounds,
)

LENGTHS = st.lists(st.integers(2, 60), max_size=12)


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    """Batches with any number of samples, of views in any order, and of pairs."""
    lengths = draw(LENGTHS)
    owners = st.lists(st.integers(0, len(lengths) - 1), max_size=15)
    chosen = draw(owners) if lengths else []
    views = [hinted.view(f"t{owner}", turn) for turn, owner in enumerate(chosen)]
    return hinted.batch(lengths, views, draw(LENGTHS))


def places(plans: Sequence[RankPlan], what: str) -> list[int]:
    microbatches = [microbatch for plan in plans for microbatch in plan.microbatches]
    return sorted(place for one in microbatches for place in getattr(one, what))


@given(batches(), st.integers(60, 200), st.integers(1, 5))
def test_all_is_trained_exactly_once_within_the_budget_views_with_their_samples_and_last(
    batch: StepBatch, budget: int, ranks: int
) -> None:
    plans = plan_step(batch, budget, ranks)
    assert plans == plan_step(batch, budget, ranks), "everybody plans alike"
    assert len(plans) == ranks
    assert places(plans, "samples") == list(range(len(batch.samples)))
    assert places(plans, "views") == list(range(len(batch.views)))
    pairs = [p for plan in plans for p in (*plan.pairs, *plan.large_pairs)]
    assert sorted(pairs) == list(range(len(batch.pairs)))
    for plan in plans:
        for microbatch in plan.microbatches:
            samples = [batch.samples[place] for place in microbatch.samples]
            assert samples
            assert len(samples) * max(len(sample.ids) for sample in samples) <= budget
            of_samples = {sample.trace_id for sample in samples}
            assert {batch.views[place].trace_id for place in microbatch.views} <= of_samples
        needs = [bool(microbatch.views) for microbatch in plan.microbatches]
        assert needs == sorted(needs)
        groups = pair_groups(batch.pairs, plan.pairs, budget)
        assert sorted(place for group in groups for place in group) == plan.pairs
        assert all(pair_tokens(batch.pairs[place]) > budget for place in plan.large_pairs)
        for group in groups:
            widest = max(pair_tokens(batch.pairs[place]) for place in group)
            assert len(group) * widest <= budget


@given(batches(), st.integers(60, 200), st.integers(1, 4))
def test_packed_microbatches_keep_the_budget_in_rows(
    batch: StepBatch, budget: int, ranks: int
) -> None:
    plans = plan_step(batch, budget, ranks, packed=True)
    assert places(plans, "samples") == list(range(len(batch.samples)))
    for microbatch in (one for plan in plans for one in plan.microbatches):
        lengths = [len(batch.samples[place].ids) for place in microbatch.samples]
        assert len(packed_rows(lengths)) * max(lengths) <= budget


@given(batches(), st.integers(60, 200), st.integers(1, 4))
def test_rounds_are_what_the_busiest_rank_needs_in_each_microbatch(
    batch: StepBatch, budget: int, ranks: int
) -> None:
    plans = plan_step(batch, budget, ranks)
    rounds = rounds_of(batch, plans, budget)
    assert rounds.microbatches == max(len(plan.microbatches) for plan in plans)
    assert rounds.pairs == max(len(pair_groups(batch.pairs, p.pairs, budget)) for p in plans)
    assert rounds.large_pairs == max(len(plan.large_pairs) for plan in plans)
    for index, most in enumerate(teacher_rounds(batch, plans, budget)):
        at_once = [p.microbatches[index] for p in plans if index < len(p.microbatches)]
        groups = [teacher_groups([batch.views[v] for v in m.views], budget) for m in at_once]
        assert most == max(len(found) for found in groups)
        assert bool(most) == any(one.views for one in at_once)


@given(batches(), st.integers(60, 80), st.integers(1, 4))
def test_with_shared_prefixes_pairs_are_in_microbatches_or_larger_than_these(
    batch: StepBatch, budget: int, ranks: int
) -> None:
    plans = plan_step(batch, budget, ranks, sharing="levels")
    large = [place for plan in plans for place in plan.large_pairs]
    assert not any(plan.pairs for plan in plans)
    assert sorted([*places(plans, "pairs"), *large]) == list(range(len(batch.pairs)))
    for place, pair in enumerate(batch.pairs):
        assert (PrefixTree.of(pair_sides(pair)).computed > budget) == (place in large)
    assert rounds_of(batch, plans, budget).large_pairs == max(len(p.large_pairs) for p in plans)


def test_one_rank_has_all_of_a_step() -> None:
    batch = hinted.batch([10, 20, 30], [hinted.view("t1")], [4, 5])
    (plan,) = plan_step(batch, 1000)
    assert [one.samples for one in plan.microbatches] == [[2, 1, 0]]
    assert plan.pairs == [0, 1]


def test_more_ranks_than_samples_leave_some_with_nothing() -> None:
    plans = plan_step(hinted.batch([10], [hinted.view("t0")]), 100, 3)
    assert [len(plan.microbatches) for plan in plans] == [1, 0, 0]


def test_a_view_without_its_sample_is_refused() -> None:
    batch = hinted.batch([10], [hinted.view("elsewhere")])
    with pytest.raises(ValueError, match="a view of trace 'elsewhere' has no sample: batch both"):
        plan_step(batch, 100)


def test_a_sample_above_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="has 11 tokens but a microbatch holds 10"):
        plan_step(hinted.batch([11]), 10)


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 6))
def test_parts_differ_by_no_more_than_the_heaviest_weight(weights: list[int], parts: int) -> None:
    shares = spread(weights, parts)
    assert sorted(place for share in shares for place in share) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(weights[place] for place in share) for share in shares]
    assert max(loads) - min(loads) <= max(weights, default=0)


@st.composite
def views_of_a_microbatch(draw: st.DrawFn) -> list[HintedView]:
    contexts = draw(st.lists(st.integers(1, 80), max_size=15))
    return [hinted.view("t", turn, context) for turn, context in enumerate(contexts)]


@given(views_of_a_microbatch(), st.integers(1, 6))
def test_teachers_share_all_views_in_order_and_about_evenly(
    views: list[HintedView], parts: int
) -> None:
    runs = split_views(views, parts)
    assert len(runs) == parts
    assert [place for run in runs for place in run] == list(range(len(views)))
    tokens = [len(view.teacher_ids) for view in views]
    for run in runs:
        load = sum(tokens[run.start : run.stop])
        assert load <= sum(tokens) / parts + max(tokens, default=0)


def test_a_pair_costs_both_padded_sides() -> None:
    batch = hinted.batch([], pairs=[6])
    assert pair_tokens(batch.pairs[0]) == 2 * (1 + 6)


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

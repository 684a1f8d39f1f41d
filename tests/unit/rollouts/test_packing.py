"""Packing: every sequence once, no forward above the budget, little padding."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.packing import microbatches, packed_rows

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(50, 200))
def test_every_sequence_is_in_one_microbatch(lengths: list[int], budget: int) -> None:
    packed = [index for group in microbatches(lengths, budget) for index in group]
    assert sorted(packed) == list(range(len(lengths)))


@given(LENGTHS, st.integers(50, 200))
def test_no_microbatch_is_wider_than_the_budget(lengths: list[int], budget: int) -> None:
    for group in microbatches(lengths, budget):
        assert len(group) * max(lengths[index] for index in group) <= budget


@given(LENGTHS, st.integers(50, 200))
def test_two_neighbouring_microbatches_never_fit_into_one(lengths: list[int], budget: int) -> None:
    groups = microbatches(lengths, budget)
    for one, two in pairwise(groups):
        assert (len(one) + 1) * max(lengths[index] for index in (*one, *two)) > budget


@given(LENGTHS, st.integers(50, 200))
def test_the_longest_sequences_share_a_microbatch(lengths: list[int], budget: int) -> None:
    order = [lengths[index] for group in microbatches(lengths, budget) for index in group]
    assert order == sorted(lengths, reverse=True)


def test_a_sequence_above_the_budget_is_refused_with_the_repair() -> None:
    with pytest.raises(ValueError, match=r"9 tokens but a microbatch holds 8: raise trainer\."):
        microbatches([3, 9], 8)


@given(LENGTHS, st.integers(50, 200))
def test_packed_microbatches_hold_every_sequence_once_in_rows_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    groups = microbatches(lengths, budget, packed=True)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[index] for index in group]
        rows = packed_rows(own)
        assert len(rows) * max(own) <= budget
        assert all(sum(own[place] for place in row) <= max(own) for row in rows)


@given(LENGTHS, st.integers(50, 200))
def test_packing_never_takes_more_microbatches(lengths: list[int], budget: int) -> None:
    assert len(microbatches(lengths, budget, packed=True)) <= len(microbatches(lengths, budget))


def test_the_shortest_fill_what_the_longest_leave() -> None:
    assert packed_rows([5, 9, 4, 1, 2]) == [[1], [0, 2], [4, 3]]
    assert microbatches([60, 50, 40, 30, 20, 10], 120, packed=True) == [[0, 1, 5], [2, 3, 4]]

"""Packing: every sequence once, no forward above the budget, little padding."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.packing import microbatches, packed_rows

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@given(LENGTHS, st.integers(50, 200))
def test_microbatches_hold_every_sequence_once_the_longest_together_as_wide_as_fits(
    lengths: list[int], budget: int
) -> None:
    groups = microbatches(lengths, budget)
    order = [index for group in groups for index in group]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    for group in groups:
        assert len(group) * max(lengths[index] for index in group) <= budget
    for one, two in pairwise(groups):
        assert (len(one) + 1) * max(lengths[index] for index in (*one, *two)) > budget
    assert len(microbatches(lengths, budget, packed=True)) <= len(groups)


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


def test_the_shortest_fill_what_the_longest_leave() -> None:
    assert packed_rows([5, 9, 4, 1, 2]) == [[1], [0, 2], [4, 3]]
    assert microbatches([60, 50, 40, 30, 20, 10], 120, packed=True) == [[0, 1, 5], [2, 3, 4]]

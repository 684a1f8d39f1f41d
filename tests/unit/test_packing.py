"""Packing: every sequence once, no forward above the budget, little padding."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.packing import microbatches

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

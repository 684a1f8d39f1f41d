"""Packing: every sequence once, no forward above the budget, little padding.

Microbatches of sequences that begin alike.

A batch for several ranks is pickled once, beside other work, and arrives as it was.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_batches import batch_of

from composer_mesh.configs.trainer import Sharing
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.packing import (
    TURN_BYTES,
    PackedBatch,
    SharedPart,
    balanced_parts,
    families,
    microbatches,
    packed_rows,
    parts_of,
    shared_microbatches,
    spread,
)
from composer_mesh.rollouts.prefix_tree import PrefixTree, unique_ids

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


def group(rng: random.Random, prompt: int, count: int, longest: int) -> list[list[list[int]]]:
    """Units that share a prompt: single sequences, and some with two sides."""
    begun = [rng.randrange(1000) for _ in range(prompt)]
    return [
        [
            begun + [rng.randrange(1000) for _ in range(rng.randrange(1, longest))]
            for _ in range(rng.randrange(1, 3))
        ]
        for _ in range(count)
    ]


def test_families_are_what_begins_alike() -> None:
    rng = random.Random(0)
    one, other = group(rng, 20, 3, 5), group(rng, 20, 2, 5)
    units = [one[0], other[0], one[1], other[1], one[2], [[7, 8, 9]]]
    found = sorted(sorted(family) for family in families(units))
    assert found == [[0, 2, 4], [1, 3], [5]]


@pytest.mark.parametrize("sharing", ["levels", "row"])
@pytest.mark.parametrize("seed", range(30))
def test_every_unit_is_in_one_microbatch_within_the_budget(seed: int, sharing: Sharing) -> None:
    rng = random.Random(seed)
    units = [
        unit
        for _ in range(rng.randrange(1, 5))
        for unit in group(rng, rng.randrange(1, 60), rng.randrange(1, 9), 30)
    ]
    rng.shuffle(units)
    budget = rng.randrange(180, 600)
    parts = parts_of(units, budget, sharing)
    assert sorted(unit for part in parts for unit in part.units) == list(range(len(units)))
    groups = shared_microbatches(parts, budget, sharing)
    assert sorted(index for one in groups for index in one) == list(range(len(parts)))
    for one in groups:
        members = [ids for index in one for unit in parts[index].units for ids in units[unit]]
        assert PrefixTree.planned(members, sharing).computed <= budget


def test_a_family_larger_than_the_budget_repeats_its_prompt_only() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(100)]
    units = [[[*prompt, *(rng.randrange(1000) for _ in range(20))]] for _ in range(8)]
    parts = parts_of(units, 180)
    assert [len(part.units) for part in parts] == [4, 4]
    assert all(part.tokens <= 180 for part in parts)


@pytest.mark.parametrize("sharing", ["levels", "row"])
@pytest.mark.parametrize("seed", range(10))
def test_microbatches_of_a_large_group_repeat_its_prompt_once_each_and_are_full(
    seed: int, sharing: Sharing
) -> None:
    rng = random.Random(seed)
    prompt, budget = rng.randrange(100, 2000), 4000
    units = group(rng, prompt, rng.randrange(2, 40), 500)
    parts = parts_of(units, budget, sharing)
    unique = unique_ids([ids for unit in units for ids in unit])
    ids = [unique_ids([one for unit in part.units for one in units[unit]]) for part in parts]
    assert sum(ids) - unique <= (prompt + 2) * (len(parts) - 1)  # two answers may begin alike
    for part in parts[:-1]:
        assert part.tokens > budget - 2 * 1000  # a unit more, padded, would not fit


def test_a_group_with_one_long_answer_is_within_the_budget_with_its_padding() -> None:
    """Rows of a level are as wide as its longest branch."""
    rng = random.Random(2)
    prompt = [rng.randrange(1000) for _ in range(2000)]
    lengths = [1900, *(rng.randrange(1000, 1100) for _ in range(30))]
    units = [[prompt + [rng.randrange(1000) for _ in range(length)]] for length in lengths]
    for part in parts_of(units, 16_000):
        tree = PrefixTree.of([units[unit][0] for unit in part.units])
        assert tree.computed == part.tokens <= 16_000


@pytest.mark.parametrize("sharing", ["levels", "row"])
def test_a_group_is_divided_between_ranks_where_the_others_would_wait(sharing: Sharing) -> None:
    rng = random.Random(3)
    answers = [rng.randrange(1000) for _ in range(900)]
    units = [[[7, *range(100), number, *answers]] for number in range(8)]
    parts = balanced_parts(units, 10_000, 2, sharing)
    assert sorted(len(part.units) for part in parts) == [4, 4]
    assert [len(part.units) for part in balanced_parts(units, 10_000, 1, sharing)] == [8]


def test_a_group_stays_whole_where_ranks_are_busy_anyway() -> None:
    rng = random.Random(4)
    units = [unit for _ in range(4) for unit in group(rng, 300, 8, 40)]
    parts = balanced_parts(units, 10_000, 2, "levels")
    assert [len(part.units) for part in parts] == [8] * 4


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_ranks_have_about_the_same_tokens_or_groups_that_dividing_would_not_help(
    seed: int, ranks: int
) -> None:
    rng = random.Random(seed)
    units = [
        unit
        for _ in range(rng.randrange(1, 6))
        for unit in group(rng, rng.randrange(20, 800), 8, rng.randrange(10, 600))
    ]
    whole = loads(parts_of(units, 20_000), ranks)
    found = loads(balanced_parts(units, 20_000, ranks, "levels"), ranks)
    assert max(found) <= max(whole)
    apart = loads(parts_of(units, 1), ranks)
    assert max(found) <= max(apart) / 0.9


def loads(parts: list[SharedPart], ranks: int) -> list[int]:
    """Tokens of each rank."""
    tokens = [part.tokens for part in parts]
    return [sum(tokens[index] for index in share) for share in spread(tokens, ranks)]


async def test_a_batch_arrives_as_it_was(build_model: Any) -> None:
    batch = batch_of(build_model(1), random.Random(3), samples=5, pairs=3)
    assert batch.views
    packed = pickle.loads(pickle.dumps(await PackedBatch.of(batch)))
    assert packed.unpack() == batch


async def test_the_event_loop_goes_on_while_a_large_batch_is_packed() -> None:
    ids = list(range(TURN_BYTES // 4))
    sample = PolicySample("t", ids, [True] * len(ids), [0.5] * len(ids), 1.0, [3] * len(ids))
    packing = asyncio.create_task(PackedBatch.of(StepBatch(0, [sample] * 4, [], [])))
    turns = 0
    while not packing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 4


async def test_a_message_to_a_rank_copies_bytes_and_no_lists() -> None:
    """So a message costs the same objects whatever the samples hold."""
    ids = list(range(1000))
    sample = PolicySample("t", ids, [True] * 1000, [0.5] * 1000, 1.0, [3] * 1000)
    packed = await PackedBatch.of(StepBatch(0, [sample], [], []))
    assert packed.rest.samples == []
    assert [type(piece) for piece in packed.samples] == [bytes]

"""Microbatches of sequences that begin alike."""

from __future__ import annotations

import random

import pytest

from composer_mesh.rollouts.prefix_tree import PrefixTree
from composer_mesh.rollouts.shared_plan import families, parts_of, shared_microbatches


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


@pytest.mark.parametrize("seed", range(30))
def test_every_unit_is_in_one_microbatch_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    units = [
        unit
        for _ in range(rng.randrange(1, 5))
        for unit in group(rng, rng.randrange(1, 60), rng.randrange(1, 9), 30)
    ]
    rng.shuffle(units)
    budget = rng.randrange(180, 600)
    parts = parts_of(units, budget)
    assert sorted(unit for part in parts for unit in part.units) == list(range(len(units)))
    groups = shared_microbatches(parts, budget)
    assert sorted(index for one in groups for index in one) == list(range(len(parts)))
    for one in groups:
        members = [ids for index in one for unit in parts[index].units for ids in units[unit]]
        assert PrefixTree.of(members).computed <= max(
            budget, *(parts[index].tokens for index in one)
        )


def test_a_family_larger_than_the_budget_repeats_its_prompt_only() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(100)]
    units = [[[*prompt, *(rng.randrange(1000) for _ in range(20))]] for _ in range(8)]
    parts = parts_of(units, 180)
    assert [len(part.units) for part in parts] == [4, 4]
    assert all(part.tokens <= 180 for part in parts)

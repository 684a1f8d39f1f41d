"""Sequences as paths of a tree: nothing is lost, and what they share is there once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from composer_mesh.rollouts.prefix_tree import Node, PrefixTree, shared_length, unique_ids

PROMPT = list(range(100, 140))


def path(tree: PrefixTree, sequence: int) -> list[int]:
    leaf = tree.leaves[sequence]
    nodes = [leaf, *leaf.ancestors()][::-1]
    starts = [sum(len(one.ids) for one in nodes[:place]) for place in range(len(nodes))]
    assert [node.start for node in nodes] == starts
    assert nodes[0].branch.level == 0
    for before, node in pairwise(nodes):
        assert before.first <= node.first < node.last <= before.last
        if node.branch is before.branch:
            assert before.offset < node.offset
        else:
            assert node.branch.level == before.branch.level + 1
            assert tree.levels[node.branch.level].follows[node.branch.row] == before.branch.row
    return [one for node in nodes for one in node.ids]


def branching(rng: random.Random, depth: int) -> list[list[int]]:
    """Random sequences that branch up to `depth` times, some of them twice or a part of others."""
    stem = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
    if depth == 0:
        return [stem] * rng.randrange(1, 3)
    found = [[stem[0], *stem]] if rng.random() < 0.3 else []
    for _ in range(rng.randrange(1, 4)):
        found += [stem + rest for rest in branching(rng, depth - 1)]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_sequence_is_its_path_and_no_shared_span_is_there_twice(seed: int) -> None:
    rng = random.Random(seed)
    sequences = branching(rng, seed % 7)
    rng.shuffle(sequences)
    shortest, row_capacity = rng.randrange(1, 6), rng.choice([0, 8, 40, 1000])
    tree = PrefixTree.of(sequences, shortest, row_capacity)
    assert [path(tree, index) for index in range(len(sequences))] == sequences
    for level in tree.levels:
        used = [
            (branch.row, branch.column + offset)
            for branch in level.branches
            for offset in range(branch.ids)
        ]
        assert len(set(used)) == len(used) == sum(level.ends)
    siblings: dict[int, list[Node]] = {}
    for level in tree.levels:
        for node in level.nodes:
            siblings.setdefault(id(node.parent), []).append(node)
    for nodes in siblings.values():
        for index, node in enumerate(nodes):
            for other in nodes[:index]:
                least = 1 if node.branch is other.branch else shortest
                assert shared_length(node.ids, other.ids) < least
    if shortest == 1:
        assert tree.ids == unique_ids(sequences)


def test_a_group_is_its_prompt_once_and_its_answers() -> None:
    sequences = [[*PROMPT, answer, answer + 1] for answer in range(8)]
    tree = PrefixTree.of(sequences, row_capacity=0)
    assert [[len(node.ids) for node in level.nodes] for level in tree.levels] == [[40], [2] * 8]
    assert [(level.rows, level.width) for level in tree.levels] == [(1, 40), (2, 8)]
    assert (tree.ids, tree.computed) == (56, 56)
    assert tree.pays


def test_a_small_group_is_one_row() -> None:
    tree = PrefixTree.of([[*PROMPT, answer, answer + 1] for answer in range(8)])
    assert [(level.rows, level.width) for level in tree.levels] == [(1, 56)]
    assert [len(node.ids) for node in tree.levels[0].nodes] == [40] + [2] * 8


def test_what_follows_a_large_node_is_in_one_piece_where_it_is_small() -> None:
    prompt = [*PROMPT] * 20
    sequences = [[*prompt, first, *PROMPT, last] for first in (1, 2) for last in (3, 4, 5)]
    tree = PrefixTree.of(sequences)
    assert [(level.rows, level.width) for level in tree.levels] == [(1, 800), (1, 88)]
    assert tree.computed == unique_ids(sequences)


def test_small_roots_beside_a_wide_one_are_not_divided() -> None:
    small = [[*PROMPT, answer, answer + 1] for answer in range(8)]
    wide = list(range(1000, 4000))
    tree = PrefixTree.of([*small, wide])
    assert [len(branch.nodes) for branch in tree.levels[0].branches] == [1, 1]
    assert [path(tree, index) for index in range(9)] == [*small, wide]


def test_long_answers_have_rows_of_their_own() -> None:
    tree = PrefixTree.of([[*PROMPT, *[answer] * 30] for answer in range(4)], row_capacity=0)
    assert [(level.rows, level.width) for level in tree.levels] == [(1, 40), (4, 30)]
    assert tree.levels[1].follows == [0, 0, 0, 0]


def test_equal_sequences_are_computed_once() -> None:
    tree = PrefixTree.of([PROMPT] * 3)
    assert (tree.ids, len(tree.levels)) == (40, 1)
    assert len({id(leaf) for leaf in tree.leaves}) == 1


def test_sequences_that_share_little_are_not_worth_a_tree() -> None:
    sequences = [[start, *PROMPT] for start in range(4)]
    assert not PrefixTree.of(sequences).pays
    short = [[*PROMPT[:4], start] for start in range(4)]
    assert len(PrefixTree.of(short).levels) == 1
    assert not PrefixTree.of(short).pays

"""A radix tree returns what a dictionary of all prefixes would, within its bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np

from composer_mesh.actors.engines.kv_cache import RadixTree

Value = list[tuple[int, ...]]
"""For each token the sequence up to it, so that a wrong value shows."""


def cut(value: Value, start: int, end: int) -> Value:
    return value[start:end]


def prefixes(ids: list[int]) -> Value:
    return [tuple(ids[: at + 1]) for at in range(len(ids))]


def put(tree: RadixTree[Value], ids: list[int], rng: random.Random) -> None:
    """Store a sequence, at once or first without its values."""
    array = np.array(ids, dtype=np.int64)

    def read(start: int, end: int) -> Value:
        return prefixes(ids)[start:end]

    if rng.random() < 0.5:
        tree.add(array, read)
        return
    tree.add(array)
    found = tree.find(array)
    assert found.ready + found.pending <= len(ids)
    tree.fill(array, read)


def stored(tree: RadixTree[Value], ids: list[int]) -> Value:
    found = tree.find(np.array(ids, dtype=np.int64))
    assert found.pending == 0
    value = [one for part, count in found.parts for one in part[:count]]
    assert value == prefixes(ids)[: len(value)]
    return value


def sequence(rng: random.Random, known: list[list[int]]) -> list[int]:
    """A new sequence, often one that begins like another."""
    begin: list[int] = []
    if known and rng.random() < 0.7:
        one = rng.choice(known)
        begin = one[: rng.randint(0, len(one))]
    return begin + [rng.randrange(3) for _ in range(rng.randint(0, 12))]


def test_an_unbounded_tree_finds_every_prefix_ever_stored(
    cases: Callable[[int], Iterator[int]],
) -> None:
    for seed in cases(150):
        rng = random.Random(seed)
        tree, known, all_prefixes = RadixTree[Value](10**6, cut), list[list[int]](), {()}
        for _ in range(40):
            tree.tick()
            ids = sequence(rng, known)
            longest = max(at for at in range(len(ids) + 1) if tuple(ids[:at]) in all_prefixes)
            assert len(stored(tree, ids)) == longest
            put(tree, ids, rng)
            known.append(ids)
            all_prefixes.update(prefixes(ids))
            assert tree.tokens == len(all_prefixes) - 1


def test_a_bounded_tree_keeps_what_was_used_last_and_nothing_wrong(
    cases: Callable[[int], Iterator[int]],
) -> None:
    for seed in cases(150):
        rng = random.Random(seed)
        capacity = rng.randint(0, 60)
        tree, known = RadixTree[Value](capacity, cut), list[list[int]]()
        for _ in range(60):
            tree.tick()
            ids = sequence(rng, known)
            before = len(stored(tree, ids))
            put(tree, ids, rng)
            known.append(ids)
            assert tree.tokens <= capacity
            kept = len(stored(tree, ids))
            assert kept >= before
            # Everything older may go for it.
            assert kept == min(len(ids), capacity)

"""Fragments and the steps at which their rounds begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from composer_mesh.plugins.islands.rounds.island import FragmentSchedule, cut


@given(sizes=some.lists(some.integers(1, 50), min_size=1, max_size=20), data=some.data())
def test_fragments_hold_each_weight_once_in_order(sizes: list[int], data: some.DataObject) -> None:
    weights = {f"w{place}": size for place, size in enumerate(sizes)}
    count = data.draw(some.integers(1, len(sizes)))

    fragments = cut(weights, count)

    assert [one.index for one in fragments] == list(range(count))
    assert all(one.sizes for one in fragments)
    assert [item for one in fragments for item in one.sizes.items()] == list(weights.items())


def test_equal_weights_make_equal_fragments() -> None:
    assert [one.size for one in cut({f"w{n}": 10 for n in range(6)}, 3)] == [20, 20, 20]


def test_more_fragments_than_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="fragments is 3 but the model has 1 trained weights"):
        cut({"w": 5}, 3)


def _due(schedule: FragmentSchedule) -> tuple[list[int], list[int]]:
    steps = range(schedule.steps + 1)
    return [n for n in steps if schedule.begins(n)], [n for n in steps if schedule.merges(n)]


def test_rounds_of_one_fragment_begin_and_end_every_h_steps() -> None:
    assert _due(FragmentSchedule(4, 0, 0, 12)) == ([4, 8, 12], [4, 8, 12])


def test_overlapped_rounds_end_later_and_the_last_at_the_end() -> None:
    assert _due(FragmentSchedule(4, 0, 1, 10)) == ([4, 8, 10], [5, 9, 10])


def test_fragments_take_turns() -> None:
    assert _due(FragmentSchedule(4, 2, 1, 9)) == ([2, 6, 9], [3, 7, 9])


@given(
    rounds=some.integers(1, 9),
    offset=some.integers(0, 8),
    overlap=some.integers(0, 8),
    steps=some.integers(1, 60),
)
def test_each_merge_follows_a_begin(rounds: int, offset: int, overlap: int, steps: int) -> None:
    schedule = FragmentSchedule(rounds, offset % rounds, overlap % rounds, steps)

    begins, merges = _due(schedule)

    assert merges[-1] == begins[-1] == steps
    assert all(
        one + schedule.overlap_steps in merges
        for one in begins
        if one + schedule.overlap_steps <= steps
    )
    assert [schedule.last_merge(n) for n in range(steps + 1)] == [
        max([0, *(one for one in merges if one <= n)]) for n in range(steps + 1)
    ]

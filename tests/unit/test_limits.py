"""How many requests start in a minute, whatever the times at which they ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.provider.limits import WINDOW_S, Pace

GAPS = st.lists(st.floats(0, 90), max_size=60)


@given(GAPS, st.integers(1, 6))
def test_no_minute_holds_more_starts_than_the_limit(gaps: list[float], limit: int) -> None:
    pace, now, starts = Pace(limit), 0.0, []
    for gap in gaps:
        now += gap
        starts.append(pace.take(now))
        assert starts[-1] >= now
    assert starts == sorted(starts)
    for first, beyond in zip(starts, starts[limit:], strict=False):
        assert beyond - first >= WINDOW_S * (1 - 1e-12)


@given(GAPS, st.integers(1, 6))
def test_no_request_waits_while_the_minute_has_room(gaps: list[float], limit: int) -> None:
    pace, now, starts = Pace(limit), 0.0, []
    for gap in gaps:
        now += gap
        recent = [start for start in starts if start + WINDOW_S > now]
        starts.append(pace.take(now))
        assert (starts[-1] == now) == (len(recent) < limit)


def test_without_a_limit_every_request_starts_at_once() -> None:
    pace = Pace(None)
    assert [pace.take(5.0) for _ in range(1000)] == [5.0] * 1000


def test_looking_takes_no_place() -> None:
    pace = Pace(1)
    assert [pace.next_start(0.0) for _ in range(3)] == [0.0] * 3
    assert (pace.take(0.0), pace.next_start(1.0)) == (0.0, 60.0)


def test_nothing_starts_while_it_is_held_and_a_shorter_hold_frees_nothing() -> None:
    pace = Pace(None)
    pace.hold(9.0)
    pace.hold(4.0)
    assert (pace.take(1.0), pace.take(10.0)) == (9.0, 10.0)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="per_minute is 0, below 1"):
        Pace(0)

"""When requests start, whatever the times at which they ask, in simulated time."""

from __future__ import annotations

import asyncio

import pytest
from fake_provider import TickingLoop, in_simulated_time
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.request_limiter import MINUTE_S, StartLimiter

GAPS = st.lists(st.floats(0, 90), max_size=40)


def now() -> float:
    return asyncio.get_running_loop().time()


async def starts_of(gaps: list[float], limiter: StartLimiter) -> list[float]:
    """When requests start that ask so long after one another."""
    starts: list[float] = []

    async def start() -> None:
        await limiter.acquire()
        starts.append(now())

    async with asyncio.TaskGroup() as asking:
        for gap in gaps:
            await asyncio.sleep(gap)
            asking.create_task(start())
    return starts


@given(GAPS, st.integers(1, 6), st.lists(st.floats(0, 200), max_size=3))
def test_no_minute_holds_more_starts_than_the_limit(
    gaps: list[float], limit: int, pauses: list[float]
) -> None:
    async def started() -> list[float]:
        limiter = StartLimiter(limit, concurrency=40)
        for at in pauses:
            asyncio.get_running_loop().call_later(at, limiter.pause, 45.0)
        return await starts_of(gaps, limiter)

    with asyncio.Runner(loop_factory=TickingLoop) as runner:
        starts = runner.run(started())
    assert len(starts) == len(gaps)
    for first, beyond in zip(starts, starts[limit:], strict=False):
        assert beyond - first >= MINUTE_S - 1e-3


@in_simulated_time
async def test_without_a_limit_every_request_starts_at_once() -> None:
    starts = await starts_of([0.0] * 1000, StartLimiter(None, concurrency=1000))
    assert max(starts) < 0.01


@in_simulated_time
async def test_a_limited_request_that_asks_late_enough_does_not_wait() -> None:
    starts = await starts_of([0.0, 30.1, 45.0, 30.1], StartLimiter(2, concurrency=4))
    assert [round(start, 3) for start in starts] == [0.0, 30.1, 75.1, 105.2]


@in_simulated_time
async def test_nothing_starts_during_a_pause_and_a_shorter_one_changes_nothing() -> None:
    limiter = StartLimiter(None, concurrency=2)
    limiter.pause(9.0)
    limiter.pause(4.0)
    await limiter.acquire()
    assert round(now(), 3) == 9.0


@in_simulated_time
async def test_a_request_long_after_a_pause_is_not_spaced() -> None:
    limiter = StartLimiter(None, concurrency=2)
    limiter.pause(8.0)
    await asyncio.sleep(10.1)
    starts = await starts_of([0.0] * 3, limiter)
    assert [round(start, 3) for start in starts] == [10.1] * 3


@in_simulated_time
@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-300])
async def test_a_pause_of_next_to_nothing_holds_nobody(seconds: float) -> None:
    limiter = StartLimiter(None, concurrency=16)
    limiter.pause(seconds)
    starts = await starts_of([0.0] * 100, limiter)
    assert max(starts) < 0.01


@in_simulated_time
async def test_a_request_that_gives_up_takes_no_start_away() -> None:
    limiter = StartLimiter(1, concurrency=3)
    await limiter.acquire()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await limiter.acquire()
    await limiter.acquire()
    assert round(now(), 3) == 60.0


@pytest.mark.parametrize("key", ["max_tokens", "concurrency", "requests_per_minute"])
def test_a_limit_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} of 't' is 0, below 1"):
        TeacherEndpoint("t", "https://x.test", "m", **{key: 0})

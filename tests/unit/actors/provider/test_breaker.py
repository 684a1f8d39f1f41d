"""What a provider is spared: requests while it fails, and more of them than its limits allow."""

from __future__ import annotations

import asyncio
import math

import pytest
from fake_provider import TickingLoop, in_simulated_time
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.request_limiter import (
    MINUTE_S,
    Breaker,
    BreakerRules,
    BreakerState,
    BreakerVerdict,
    StartLimiter,
)

RULES = BreakerRules(failures=3, rest_s=10.0)


def started(breaker: Breaker, now: float) -> int:
    permit = breaker.start(now)
    assert permit is not None
    return permit


def tripped(now: float = 0.0) -> Breaker:
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.end(started(breaker, now), BreakerVerdict.FAILED, now)
    return breaker


def test_it_opens_at_the_last_failure_of_a_row_and_not_before() -> None:
    breaker = Breaker(RULES)
    for _ in range(2):
        breaker.end(started(breaker, 0), BreakerVerdict.FAILED, 0)
    assert breaker.state(0) is BreakerState.CLOSED
    breaker.end(started(breaker, 0), BreakerVerdict.FAILED, 0)
    assert breaker.state(0) is BreakerState.OPEN
    assert (breaker.start(9.99), breaker.opened) == (None, 1)
    assert (breaker.rest_s(4), breaker.rest_s(11)) == (6, 0)


def test_after_the_rest_one_request_tries_and_the_others_wait() -> None:
    breaker = tripped()
    assert breaker.state(10) is BreakerState.HALF_OPEN
    probe = started(breaker, 10)
    assert breaker.start(11) is None
    breaker.end(probe, BreakerVerdict.ANSWERED, 12)
    assert breaker.state(12) is BreakerState.CLOSED
    assert breaker.start(12) is not None


def test_a_probe_that_fails_opens_it_for_another_rest() -> None:
    breaker = tripped()
    breaker.end(started(breaker, 10), BreakerVerdict.FAILED, 15)
    assert breaker.start(24.9) is None
    assert breaker.opened == 2
    assert breaker.start(25) is not None


def test_a_probe_that_was_never_sent_lets_the_next_one_try() -> None:
    breaker = tripped()
    breaker.end(started(breaker, 10), BreakerVerdict.NOTHING, 11)
    probe = started(breaker, 11)
    breaker.end(probe, BreakerVerdict.BUSY, 12)
    assert breaker.state(12) is BreakerState.CLOSED


def test_what_began_before_it_opened_neither_closes_nor_prolongs() -> None:
    breaker = Breaker(RULES)
    early = [started(breaker, 0) for _ in range(6)]
    for permit in early[:3]:
        breaker.end(permit, BreakerVerdict.FAILED, 1)
    breaker.end(early[3], BreakerVerdict.ANSWERED, 2)
    breaker.end(early[4], BreakerVerdict.FAILED, 9)
    assert (breaker.state(9), breaker.rest_s(9)) == (BreakerState.OPEN, 2)
    probe = started(breaker, 11)
    breaker.end(early[5], BreakerVerdict.FAILED, 12)
    breaker.end(probe, BreakerVerdict.ANSWERED, 13)
    assert breaker.state(13) is BreakerState.CLOSED


@pytest.mark.parametrize("rest_s", [0.0, -1.0, math.inf, math.nan])
def test_rules_that_could_not_hold_are_refused(rest_s: float) -> None:
    with pytest.raises(ValueError, match="rest a number of seconds above 0"):
        BreakerRules(rest_s=rest_s)
    with pytest.raises(ValueError, match="no request could be sent"):
        BreakerRules(failures=0)


EVENTS = st.lists(
    st.tuples(st.floats(0, 8), st.integers(0, 3), st.sampled_from(list(BreakerVerdict))),
    max_size=120,
)


@given(EVENTS)
def test_it_never_gives_two_probes_nor_a_permit_before_the_rest_is_over(
    events: list[tuple[float, int, BreakerVerdict]],
) -> None:
    """Each event lets time pass, then starts a request, or ends the one at a place in line."""
    breaker, now = Breaker(RULES), 0.0
    under_way: list[tuple[int, BreakerState]] = []
    opened_at = -math.inf
    for passed, place, verdict in events:
        now += passed
        before, opened = breaker.state(now), breaker.opened
        if place == 0 or not under_way:
            permit = breaker.start(now)
            probing = any(state is BreakerState.HALF_OPEN for _, state in under_way)
            if permit is not None:
                assert before is not BreakerState.OPEN
                assert now >= opened_at + RULES.rest_s or before is BreakerState.CLOSED
                assert not (before is BreakerState.HALF_OPEN and probing)
                under_way.append((permit, before))
            else:
                assert before is not BreakerState.CLOSED
        else:
            permit, _ = under_way.pop(place % len(under_way))
            breaker.end(permit, verdict, now)
        if breaker.opened > opened:
            assert verdict is BreakerVerdict.FAILED
            opened_at = now


@given(st.lists(st.sampled_from(list(BreakerVerdict)), max_size=60))
def test_one_after_the_other_it_opens_exactly_at_a_row_of_failures(
    verdicts: list[BreakerVerdict],
) -> None:
    breaker, row = Breaker(RULES), 0
    for verdict in verdicts:
        breaker.end(started(breaker, 0), verdict, 0)
        row = {BreakerVerdict.FAILED: row + 1, BreakerVerdict.ANSWERED: 0}.get(verdict, row)
        assert (breaker.state(0) is BreakerState.OPEN) == (row == RULES.failures)
        if row == RULES.failures:
            return


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

"""Limits the requests to one teacher: concurrency, requests per minute, circuit breaker.

Combines the teacher's semaphore, start limiter and breaker, and waits for them.

Limits when requests to one teacher may start: a rate per minute, and pauses.

The rate is a leaky bucket of `aiolimiter` that holds one request: no bursts, so no 60 seconds
contain more starts than the limit, also after a pause.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aiolimiter import AsyncLimiter

from composer_mesh.actors.provider.endpoint import TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    BreakerVerdict,
    ProviderCrowded,
    ProviderError,
    ProviderSuspended,
)
from composer_mesh.rollouts.pairs import FailureKind


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """After `failures` in a row, requests stop for `rest_s` seconds; then one request probes."""

    failures: int = 5
    rest_s: float = 30.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ValueError(f"failures is {self.failures}, below 1: no request could be sent")
        if not 0 < self.rest_s < math.inf:
            raise ValueError(f"rest_s is {self.rest_s}: rest a number of seconds above 0")


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Circuit breaker for one thread, without clock or waiting; `opened` counts how often it did.

        closed -- `failures` in a row --> open -- after `rest_s` --> half-open, one probe
          ^                                ^                            |
          |                                +------- it fails -----------+
          +------------------------- it is answered --------------------+

    Each request gets a permit from `start` and ends once with `end`. Requests that started before
    the last state change are not counted. Times are seconds of any monotonic clock. The caller
    decides what counts as a failure.
    """

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._epoch, self._row, self._probing = 0, 0, False
        self._rest_until: float | None = None
        self.opened = 0

    def state(self, now: float) -> BreakerState:
        if self._rest_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._rest_until else BreakerState.HALF_OPEN

    def refuses(self, now: float) -> bool:
        """Return whether `start` would return None."""
        state = self.state(now)
        return state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._probing)

    def rest_s(self, now: float) -> float:
        """Return the seconds until a request may probe; 0 if one may already, or is in flight."""
        return 0.0 if self._rest_until is None else max(0.0, self._rest_until - now)

    def start(self, now: float) -> int | None:
        """Return a permit for one request, or None; half-open allows a single one.

        A permit is valid for the current state of the breaker.
        """
        if self.refuses(now):
            return None
        self._probing = self.state(now) is BreakerState.HALF_OPEN
        return self._epoch

    def end(self, permit: int, verdict: BreakerVerdict, now: float) -> None:
        """Record the result of a request."""
        if permit != self._epoch:
            return
        if self._probing:
            self._end_probe(verdict, now)
        elif verdict is BreakerVerdict.ANSWERED:
            self._row = 0
        elif verdict is BreakerVerdict.FAILED:
            self._row += 1
            if self._row >= self._rules.failures:
                self._open(now)

    def _end_probe(self, verdict: BreakerVerdict, now: float) -> None:
        if verdict is BreakerVerdict.FAILED:
            self._open(now)
        elif verdict is BreakerVerdict.NOTHING:
            self._probing = False  # the next request is the probe
        else:
            self._change(rest_until=None)

    def _open(self, now: float) -> None:
        self.opened += 1
        self._change(rest_until=now + self._rules.rest_s)

    def _change(self, rest_until: float | None) -> None:
        self._rest_until = rest_until
        self._epoch, self._row, self._probing = self._epoch + 1, 0, False


MINUTE_S = 60.0
SPREAD = 0.25
"""Fraction of a pause over which unthrottled requests start after it."""
LEAST_SPACING_S = 1e-6
RESTS = 3
"""Suspensions in a row, without an answer between them, that a patient request waits for."""
BY_A_PERSON = (FailureKind.AUTH, FailureKind.PAYMENT)
"""Failures that only a person can fix."""


class StartLimiter:
    """Start limiter of the event loop that it is created in.

    `concurrency` is the maximum number of waiting requests; they are spread after a pause.
    """

    def __init__(self, per_minute: int | None, concurrency: int) -> None:
        self._concurrency, self._clock = concurrency, asyncio.get_running_loop().time
        self._rate = None if per_minute is None else AsyncLimiter(1, MINUTE_S / per_minute)
        self._paused_until = self._spread_until = -math.inf
        self._spread: AsyncLimiter | None = None

    @property
    def paused_s(self) -> float:
        """Seconds until requests may start again; 0 if they may."""
        return max(0.0, self._paused_until - self._clock())

    def pause(self, seconds: float) -> None:
        """Block all starts for some seconds; has no effect during a longer pause."""
        until = self._clock() + seconds
        if seconds > 0 and until > self._paused_until:
            spacing = max(SPREAD * seconds / self._concurrency, LEAST_SPACING_S)
            self._paused_until, self._spread_until = until, until + SPREAD * seconds
            self._spread = AsyncLimiter(1, spacing)

    async def acquire(self) -> None:
        """Wait until one request may start; a cancelled caller consumes no start."""
        may_start = False
        while not may_start:
            await asyncio.sleep(self.paused_s)
            if (limiter := self._limiter()) is not None:
                await limiter.acquire()
            may_start = not self.paused_s  # a pause may have started while this waited for the rate

    def _limiter(self) -> AsyncLimiter | None:
        if self._rate is not None:
            return self._rate
        return self._spread if self._clock() < self._spread_until else None


@dataclass
class Deadline:
    """Deadline of one query: at most `total_s` after it is first sent.

    `at` is a time of the running event loop.
    """

    timeouts: Timeouts
    at: float

    @classmethod
    def of(cls, timeouts: Timeouts) -> "Deadline":
        return cls(timeouts, _now() + timeouts.line_s + timeouts.total_s)

    @property
    def left_s(self) -> float:
        return self.at - _now()

    def leave_line(self) -> None:
        """Start the `total_s` period as the query is about to be sent."""
        self.at = min(self.at, _now() + self.timeouts.total_s)


class RequestLimiter:
    """Request limiter of one event loop; `counts` has the results of queries by kind.

    With `give_up` requests wait for a suspended teacher until it is set, at most `RESTS` times in a
    row, unless its failure needs a person.
    """

    def __init__(
        self, teacher: TeacherEndpoint, rules: BreakerRules, give_up: asyncio.Event | None = None
    ) -> None:
        self.teacher, self.counts = teacher, Counter[str]()
        self._give_up, self._in_vain = give_up, 0.0
        self._rules, self._clock = rules, asyncio.get_running_loop().time
        self._slots = asyncio.Semaphore(teacher.concurrency)
        self._starts = StartLimiter(teacher.requests_per_minute, teacher.concurrency)
        self._breaker = Breaker(rules)
        self._waiting, self._under_way, self._last_failure = 0, 0, ""

    @asynccontextmanager
    async def turn(self, deadline: Deadline) -> AsyncIterator[None]:
        """Wait for permission to send one request, at most until the deadline.

        The breaker records how the block ends, and a Retry-After pauses all requests. Raises
        ProviderSuspended while the breaker is open, and ProviderCrowded if the limits leave no
        start in time. The block calls `deadline.leave_line` when it is about to send.
        """
        await self._until_rested()
        self._waiting += 1
        try:
            most = self.teacher.concurrency
            crowd = f"{most} requests were under way all the time that it had"
            await self._in_time(self._slots.acquire(), deadline, crowd)
        finally:
            self._waiting -= 1
        try:
            self._refuse_a_longer_pause(deadline)
            late = "no request may start in the time that it had, at this many a minute"
            await self._in_time(self._starts.acquire(), deadline, late)
            await self._until_rested()
            with self._counted():
                yield
        finally:
            self._slots.release()

    async def _until_rested(self) -> None:
        """Raise ProviderSuspended if the breaker refuses requests, and they are not to wait."""
        while self._breaker.refuses(now := self._clock()):
            if self._give_up is not None and self._in_vain <= RESTS and not self._give_up.is_set():
                with suppress(TimeoutError):
                    rest_s = self._breaker.rest_s(now) or self._rules.rest_s
                    await asyncio.wait_for(self._give_up.wait(), rest_s)
                continue
            rest_s = self._breaker.rest_s(now)
            next_try = f"the next one waits {rest_s:.3g} s" if rest_s else "one tries again now"
            raise ProviderSuspended(
                self.teacher.name,
                f"{self._rules.failures} requests failed in a row or the one that tried again did "
                f"({self._last_failure}), so {next_try}",
            )

    def rests_for(self, seconds: float) -> bool:
        """Return whether the breaker would still be open after this many seconds."""
        return self._breaker.rest_s(self._clock()) > seconds

    def details(self) -> dict[str, Any]:
        return {
            "breaker": self._breaker.state(self._clock()).value,
            "opened": self._breaker.opened,
            "under_way": self._under_way,
            "waiting": self._waiting,
            "counts": dict(self.counts),
        }

    async def _in_time(
        self, waiting: Coroutine[Any, Any, object], deadline: Deadline, why: str
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline.at if deadline.at < math.inf else None):
                await waiting
        except TimeoutError:
            raise ProviderCrowded(self.teacher.name, why) from None

    def _refuse_a_longer_pause(self, deadline: Deadline) -> None:
        if (paused_s := self._starts.paused_s) > deadline.left_s:
            raise ProviderCrowded(
                self.teacher.name,
                f"the next request may start in {paused_s:.3g} s, after the time that it had",
            )

    def _pause(self, error: ProviderError) -> None:
        """Pause all requests for the provider's Retry-After, at most for `rest_s` of the breaker.

        A single response is not trusted to stop all other queries for longer.
        """
        if error.retryable and error.retry_after_s is not None:
            self._starts.pause(min(error.retry_after_s, self._rules.rest_s))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count one running request, and report its result to the breaker."""
        permit = self._breaker.start(self._clock())
        assert permit is not None, "a resting teacher was queried"
        verdict, opened = BreakerVerdict.NOTHING, self._breaker.opened
        self._under_way += 1
        try:
            yield
            verdict, self._in_vain = BreakerVerdict.ANSWERED, 0.0
        except ProviderError as error:
            verdict = error.verdict
            if error.kind in BY_A_PERSON:
                self._in_vain = math.inf
            self._pause(error)
            if verdict is BreakerVerdict.FAILED:
                self._last_failure = error.text
            raise
        finally:
            self._under_way -= 1
            self._breaker.end(permit, verdict, self._clock())
            self._in_vain += self._breaker.opened - opened


def _now() -> float:
    return asyncio.get_running_loop().time()

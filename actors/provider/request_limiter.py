"""The way to one teacher: how many requests at once, how many a minute, and none while it rests.

Joins the teacher's slots, its pace and its breaker, and waits for them. What is sent, what it
costs and whether it is tried again is not known here.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from composer_mesh.actors.provider.breaker import Breaker, BreakerRules, Verdict
from composer_mesh.actors.provider.endpoint import TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import (
    ProviderCrowded,
    ProviderError,
    ProviderSuspended,
)
from composer_mesh.actors.provider.limits import Pace

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


@dataclass
class Deadline:
    """When one question must have ended: `total_s` after it left the line, or sooner."""

    timeouts: Timeouts
    clock: Clock
    at: float

    @classmethod
    def of(cls, timeouts: Timeouts, clock: Clock) -> "Deadline":
        return cls(timeouts, clock, clock() + timeouts.line_s + timeouts.total_s)

    @property
    def left_s(self) -> float:
        return self.at - self.clock()

    def leave_line(self) -> None:
        """The question is about to be sent: from now on it has `total_s`."""
        self.at = min(self.at, self.clock() + self.timeouts.total_s)


class RequestLimiter:
    """Belongs to one event loop. `counts` tells how questions ended, by kind."""

    def __init__(
        self, teacher: TeacherEndpoint, rules: BreakerRules, clock: Clock, sleep: Sleep
    ) -> None:
        self.teacher, self.counts = teacher, Counter[str]()
        self._rules, self._clock, self._sleep = rules, clock, sleep
        self._slots = asyncio.Semaphore(teacher.concurrency)
        self._pace, self._breaker = Pace(teacher.requests_per_minute), Breaker(rules)
        self._waiting, self._under_way, self._last_failure = 0, 0, ""

    @asynccontextmanager
    async def turn(self, deadline: Deadline) -> AsyncIterator[None]:
        """Leave to send one request. Waits for the teacher's limits, not beyond the deadline.

        What ends the block is counted by the breaker. Raises ProviderSuspended while the teacher
        rests, and ProviderCrowded where the limits leave no room in time.
        """
        self.refuse_while_resting()
        self._waiting += 1
        try:
            await self._take_slot(deadline)
        finally:
            self._waiting -= 1
        try:
            await self._keep_pace(deadline)
            self.refuse_while_resting()
            deadline.leave_line()
            with self._counted():
                yield
        finally:
            self._slots.release()

    def refuse_while_resting(self) -> None:
        """Raises ProviderSuspended where no request may be sent now."""
        now = self._clock()
        if self._breaker.refuses(now):
            rest_s = self._breaker.rest_s(now)
            next_try = f"the next one waits {rest_s:.3g} s" if rest_s else "one tries again now"
            raise ProviderSuspended(
                self.teacher.name,
                f"{self._rules.failures} requests failed in a row or the one that tried again did "
                f"({self._last_failure}), so {next_try}",
            )

    def rests_for(self, seconds: float) -> bool:
        """Whether a request that waits so long would still find it resting."""
        return self._breaker.rest_s(self._clock()) > seconds

    def hold(self, seconds: float) -> None:
        """Send nothing for so long, because the provider asked for it; at most a breaker's rest.

        One question's answer is not trusted to stop all the others for longer.
        """
        self._pace.hold(self._clock() + min(seconds, self._rules.rest_s))

    def details(self) -> dict[str, Any]:
        return {
            "breaker": self._breaker.state(self._clock()).value,
            "opened": self._breaker.opened,
            "under_way": self._under_way,
            "waiting": self._waiting,
            "counts": dict(self.counts),
        }

    async def _take_slot(self, deadline: Deadline) -> None:
        seconds = deadline.left_s
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                await self._slots.acquire()
        except TimeoutError:
            most = self.teacher.concurrency
            raise ProviderCrowded(
                self.teacher.name, f"{most} requests were under way all the time that it had"
            ) from None

    async def _keep_pace(self, deadline: Deadline) -> None:
        now = self._clock()
        if (start := self._pace.next_start(now)) > deadline.at:
            raise ProviderCrowded(
                self.teacher.name,
                f"the next request may start in {start - now:.3g} s, after the time that it had",
            )
        self._pace.take(now)
        while (wait_s := start - self._clock()) > 0:
            await self._sleep(wait_s)
            held = self._pace.held_until
            if held <= start:
                return
            start = held

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """One request, whose end the breaker is told."""
        permit = self._breaker.start(self._clock())
        assert permit is not None, "a resting teacher was asked"
        verdict = Verdict.NOTHING
        self._under_way += 1
        try:
            yield
            verdict = Verdict.ANSWERED
        except ProviderError as error:
            verdict = error.verdict
            if verdict is Verdict.FAILED:
                self._last_failure = error.text
            raise
        finally:
            self._under_way -= 1
            self._breaker.end(permit, verdict, self._clock())

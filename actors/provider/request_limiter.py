"""The way to one teacher: how many requests at once, how many a minute, and none while it rests.

Joins the teacher's slots, its pace and its breaker, and waits for them. What is sent, what it
costs and whether it is tried again is not known here.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
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
from composer_mesh.actors.provider.limits import StartLimiter


@dataclass
class Deadline:
    """When one question must have ended: `total_s` after it left the line, or sooner.

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
        """The question is about to be sent: from now on it has `total_s`."""
        self.at = min(self.at, _now() + self.timeouts.total_s)


class RequestLimiter:
    """Belongs to one event loop. `counts` tells how questions ended, by kind."""

    def __init__(self, teacher: TeacherEndpoint, rules: BreakerRules) -> None:
        self.teacher, self.counts = teacher, Counter[str]()
        self._rules, self._clock = rules, asyncio.get_running_loop().time
        self._slots = asyncio.Semaphore(teacher.concurrency)
        self._starts = StartLimiter(teacher.requests_per_minute, teacher.concurrency)
        self._breaker = Breaker(rules)
        self._waiting, self._under_way, self._last_failure = 0, 0, ""

    @asynccontextmanager
    async def turn(self, deadline: Deadline) -> AsyncIterator[None]:
        """Leave to send one request. Waits for the teacher's limits, not beyond the deadline.

        What ends the block is counted by the breaker, and a Retry-After pauses all requests. Raises
        ProviderSuspended while the teacher rests, and ProviderCrowded where the limits leave no
        start in time.
        """
        self.refuse_while_resting()
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
        """Send nothing for as long as the provider asked; at most for a breaker's rest.

        One question's answer is not trusted to stop all the others for longer.
        """
        if error.retryable and error.retry_after_s is not None:
            self._starts.pause(min(error.retry_after_s, self._rules.rest_s))

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
            self._pause(error)
            if verdict is Verdict.FAILED:
                self._last_failure = error.text
            raise
        finally:
            self._under_way -= 1
            self._breaker.end(permit, verdict, self._clock())


def _now() -> float:
    return asyncio.get_running_loop().time()

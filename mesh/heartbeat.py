"""Detects hung actors: an actor without recent answers is queried, and times out if silent.

An actor that computes still answers, because its work runs in threads; one that is stopped, or
whose event loop is blocked, does not. The owner handles a hung actor.

When an actor was working: busy intervals of each of its endpoints.

Calls of one actor and one endpoint that overlap are one interval. A process logs the calls that it
makes (the controller) or serves (an actor, called by others). Costs two dictionary operations a
call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from composer_mesh.mesh.waiting import cancel_and_wait

MOST = 5000
"""Ended intervals that are kept until they are taken; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class Busy:
    """An interval in which an actor had calls of an endpoint, in seconds since 1970.

    `actor` is empty in an actor's own log: its owner knows the name.
    """

    actor: str
    endpoint: str
    began: float
    ended: float


@dataclass(slots=True)
class _Open:
    calls: int
    began: float


class ActivityLog:
    """Busy intervals of actors, on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._open: dict[tuple[str, str], _Open] = {}
        self._ended: deque[Busy] = deque(maxlen=MOST)

    @contextmanager
    def call(self, actor: str, endpoint: str) -> Iterator[None]:
        """Count a call for the length of a block."""
        key = (actor, endpoint)
        if (found := self._open.get(key)) is None:
            found = self._open[key] = _Open(0, self._clock())
        found.calls += 1
        try:
            yield
        finally:
            found.calls -= 1
            if not found.calls:
                del self._open[key]
                self._ended.append(Busy(*key, found.began, self._clock()))

    def take(self) -> list[Busy]:
        """Return the intervals since the last call; one that continues is divided now."""
        now, ended = self._clock(), list(self._ended)
        self._ended.clear()
        for key, one in self._open.items():
            ended.append(Busy(*key, one.began, now))
            one.began = now
        return ended


@dataclass(frozen=True)
class HeartbeatRules:
    """A heartbeat is sent after `every_s` without an answer; none within `hang_s` means a hang."""

    every_s: float
    hang_s: float

    def __post_init__(self) -> None:
        if not 0 < self.every_s <= self.hang_s:
            raise ValueError(
                f"every_s is {self.every_s:g} and hang_s is {self.hang_s:g}: pass seconds above 0, "
                "and hang_s no shorter than every_s"
            )

    def silence(self) -> str:
        """Return the message for a hang."""
        return f"it gave no answer within {self.hang_s:g} s"


class LastAnswer:
    """Time of an actor's last answer, to any call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()

    def record_answer(self) -> None:
        """Record an answer now."""
        self._at = self._clock()

    def age_s(self) -> float:
        """Return the seconds since the last answer."""
        return self._clock() - self._at


async def wait_until_silent(
    ask: Callable[[], Coroutine[Any, Any, Any]], rules: HeartbeatRules, last: LastAnswer
) -> None:
    """Query when there was no answer for `every_s`; return once a query got none for `hang_s`.

    An error counts as an answer: the actor was alive to raise it.
    """
    while True:
        await asyncio.sleep(max(rules.every_s - last.age_s(), 0))
        if last.age_s() < rules.every_s:
            continue
        if not await _answered(ask(), rules):
            return
        last.record_answer()


async def _answered(asking: Coroutine[Any, Any, Any], rules: HeartbeatRules) -> bool:
    """Count time in slices, so that it does not advance while this process is stopped."""
    answer, silent = asyncio.ensure_future(asking), 0.0
    try:
        while silent < rules.hang_s:
            look_s = min(rules.every_s, rules.hang_s - silent)
            if (await asyncio.wait([answer], timeout=look_s))[0]:
                return True
            silent += look_s
        return False
    finally:
        await cancel_and_wait([answer])

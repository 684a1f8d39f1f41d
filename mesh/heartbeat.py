"""Detects hung actors: an actor without recent answers is queried, and times out if silent.

An actor that computes still answers, because its work runs in threads; one that is stopped, or
whose event loop is blocked, does not. The owner handles a hung actor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from composer_mesh.mesh.waiting import cancel_and_wait


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

"""Whether an actor still answers: asked when it has not been heard, judged by its silence.

An actor that computes answers, because its work is in threads; one that is stopped, or whose loop
stands still, does not. What becomes of a silent one is its owner's business.
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
    """A question after `every_s` without a word; one unanswered for `hang_s` means a hang."""

    every_s: float
    hang_s: float

    def __post_init__(self) -> None:
        if not 0 < self.every_s <= self.hang_s:
            raise ValueError(
                f"every_s is {self.every_s:g} and hang_s is {self.hang_s:g}: pass seconds above 0, "
                "and hang_s no shorter than every_s"
            )

    def silence(self) -> str:
        """What is said of a hang."""
        return f"it gave no answer within {self.hang_s:g} s"


class LastWord:
    """When an actor was last heard, whatever it was asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()

    def heard(self) -> None:
        """It has answered somebody now."""
        self._at = self._clock()

    def age_s(self) -> float:
        """Seconds since then."""
        return self._clock() - self._at


async def wait_until_silent(
    ask: Callable[[], Coroutine[Any, Any, Any]], rules: HeartbeatRules, last: LastWord
) -> None:
    """Ask whenever nothing was heard for `every_s`; ends once that had no answer for `hang_s`.

    An error is an answer: somebody was there to raise it.
    """
    while True:
        await asyncio.sleep(max(rules.every_s - last.age_s(), 0))
        if last.age_s() < rules.every_s:
            continue
        if not await _answered(ask(), rules):
            return
        last.heard()


async def _answered(asking: Coroutine[Any, Any, Any], rules: HeartbeatRules) -> bool:
    """Time is counted in slices, so that it stands still while this process itself does."""
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

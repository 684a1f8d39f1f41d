"""The circuit breaker of one teacher: a pure state machine without clock or waiting.

    closed -- `failures` in a row --> open -- after `rest_s` --> half-open, one probe
      ^                                ^                            |
      |                                +------- it fails -----------+
      +------------------------- it is answered --------------------+

Each request gets a permit from `start` and ends once with `end`. Requests that started before the
last state change are not counted. Times are seconds of any monotonic clock. The caller decides what
counts as a failure.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


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


class BreakerVerdict(StrEnum):
    """State of the provider, as the end of a request shows it."""

    ANSWERED = "answered"
    """The provider works, even if it refused this request."""

    BUSY = "busy"
    """The provider is at its limit: neither a failure nor the end of a row of failures."""

    FAILED = "failed"

    NOTHING = "nothing"
    """The request was not sent, or its result was not awaited."""


class Breaker:
    """Circuit breaker for one thread; `opened` counts how often it opened."""

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

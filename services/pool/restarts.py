"""Restart limits and backoff: pure rules without clocks.

    wait before restart k of a window = uniform(0, min(backoff_max_s, backoff_s * 2^k))

`restart_manager` does the restarting. Full jitter keeps processes that died together
from restarting together.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from composer_mesh.configs.supervision import SupervisionConfig
from composer_mesh.mesh.failures import error_key, is_deterministic


@dataclass(frozen=True)
class RestartRules:
    """At most `restarts` within any `window_s`, each after a wait that doubles from `backoff_s`."""

    restarts: int
    window_s: float = 300.0
    backoff_s: float = 0.5
    backoff_max_s: float = 15.0
    seed: int = 0
    forgives: bool = False
    """Whether a replacement that serves ends the count: where callers bound what kills them."""

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}, but cannot be below 0: pass 0 or more")
        for name in ("window_s", "backoff_s", "backoff_max_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name):g}: pass seconds above 0")

    @classmethod
    def of(cls, config: SupervisionConfig, seed: int) -> RestartRules:
        """Return the rules of a run."""
        return cls(config.restarts, config.window_s, config.backoff_s, config.backoff_max_s, seed)


class RestartBudget:
    """The restarts of one slot. `now` is a reading of any monotonic clock."""

    def __init__(self, rules: RestartRules, name: str) -> None:
        self._rules = rules
        self._rng = random.Random(f"{rules.seed}:{name}")
        self._begun: deque[float] = deque()
        self._last_error = ""

    def take(self, now: float) -> float | None:
        """Use one restart; return the seconds to wait before it, None if none is left."""
        while self._begun and now - self._begun[0] >= self._rules.window_s:
            self._begun.popleft()
        if len(self._begun) >= self._rules.restarts:
            return None
        doubled = self._rules.backoff_s * 2.0 ** min(len(self._begun), 60)
        self._begun.append(now)
        return self._rng.uniform(0.0, min(self._rules.backoff_max_s, doubled))

    def repeats_its_error(self, error: BaseException) -> bool:
        """Whether a start failed by the same deterministic error as the start before it."""
        key, before = error_key(error), self._last_error
        self._last_error = key
        return is_deterministic(error) and key == before

    def spent(self) -> str:
        """Return the message for an exhausted budget."""
        return (
            f"given up after {self._rules.restarts} restarts within {self._rules.window_s:g} s: "
            "see what it died of, or raise supervision.restarts"
        )

    def served(self) -> None:
        """Reset the last error after a successful start."""
        self._last_error = ""
        if self._rules.forgives:
            self._begun.clear()

"""What a request asks for, read from its query: charts, rollouts, or the table of runs.

Anything that is not understood falls back to the usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.series import AXES, Axis
from composer_mesh.services.store.rows import GroupState, Where

Colouring = Literal["none", "logprob", "version", "advantage", "divergence"]
COLOURINGS: tuple[Colouring, ...] = ("none", "logprob", "version", "advantage", "divergence")
PAGE_SIZE = 50
MOST_PAGES = 1_000_000
LONGEST_DIGITS = 12
SMOOTHINGS = (0.0, 0.6, 0.9, 0.97)
SORTS = {
    "group": ("group_id", False),
    "newest": ("group_id", True),
    "reward": ("reward", False),
    "-reward": ("reward", True),
    "turns": ("turns", True),
    "tokens": ("tokens", True),
    "errors": ("error_sites", True),
}
"""Orders of rollouts: the field of the index, and whether the largest come first."""
LONGEST_TEXT = 200


@dataclass(frozen=True)
class ChartOptions:
    """Axis and smoothing of charts."""

    axis: Axis = "step"
    smoothing: float = 0.0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> ChartOptions:
        axis: Axis = next((one for one in AXES if one == query.get("x")), "step")
        smoothing = _float(query.get("smooth"))
        fits = smoothing is not None and 0 <= smoothing < 1
        return cls(axis, smoothing if fits and smoothing is not None else 0.0)


@dataclass(frozen=True)
class RolloutFilter:
    """Which rollouts a page lists. `step` counts from 1, `page` from 0."""

    outcome: str = ""
    error: str = ""
    split: str = ""
    state: str = ""
    group: int | None = None
    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    sort: str = "newest"
    page: int = 0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RolloutFilter:
        def one_of(key: str, known: tuple[str, ...], usual: str = "") -> str:
            return query.get(key, "") if query.get(key) in known else usual

        return cls(
            outcome=one_of("outcome", ("solved", "failed")),
            error=_printable(query.get("error", "")),
            split=one_of("split", ("train", "heldout")),
            state=one_of("state", tuple(GroupState)),
            group=_int(query.get("group")),
            step=_int(query.get("step")),
            min_reward=_float(query.get("min_reward")),
            max_reward=_float(query.get("max_reward")),
            sort=one_of("sort", tuple(SORTS), "newest"),
            page=min(_int(query.get("page")) or 0, MOST_PAGES),
        )

    def where(self) -> Where:
        """Return the filter of the store's index."""
        return Where(
            group_id=self.group,
            step=None if self.step is None else self.step - 1,
            split=self.split or None,
            state=GroupState(self.state) if self.state else None,
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            success=None if not self.outcome else self.outcome == "solved",
            error=self.error or None,
        )

    def query(self, **changes: object) -> str:
        """Return the query of this filter with changes, without what is as usual."""
        values = {**vars(self), **changes}
        kept = {
            key: value
            for key, value in values.items()
            if value not in ("", None) and value != getattr(RolloutFilter(), key)
        }
        return urlencode(kept)


def colouring_of(query: Mapping[str, str]) -> Colouring:
    return next((one for one in COLOURINGS if one == query.get("colour")), "none")


def page_of(query: Mapping[str, str]) -> int:
    return min(_int(query.get("page")) or 0, MOST_PAGES)


def _printable(text: str) -> str:
    """Return a text that a page can repeat; others are left out, and fit everything."""
    return text if text.isprintable() and len(text) <= LONGEST_TEXT else ""


def _int(text: str | None) -> int | None:
    text = (text or "").strip()
    if not text.isascii() or not text.isdecimal() or len(text) > LONGEST_DIGITS:
        return None
    return int(text)


def _float(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


RUNS_OF_A_PAGE = 100
STATES = ("running", "finished", "stopped", "failed", "died", "silent")
RUN_SORTS: dict[str, Callable[[RunSummary], tuple[float, str]]] = {
    "updated": lambda run: (-run.updated, run.name),
    "name": lambda run: (0.0, run.name),
    "reward": lambda run: (-(run.reward or 0.0), run.name),
    "success": lambda run: (-(run.evaluations[-1].success if run.evaluations else -1.0), run.name),
    "speed": lambda run: (-(run.tokens_per_s or 0.0), run.name),
    "dollars": lambda run: (-run.usd, run.name),
}


@dataclass(frozen=True)
class RunTable:
    """What the table shows. `text` is looked for in names and in values of the config."""

    text: str = ""
    state: str = ""
    sort: str = "updated"
    page: int = 0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> RunTable:
        state, sort = query.get("state", ""), query.get("sort", "")
        return cls(
            query.get("q", "")[:LONGEST_TEXT],
            state if state in STATES else "",
            sort if sort in RUN_SORTS else "updated",
            page_of(query),
        )

    @property
    def states(self) -> Sequence[str]:
        return STATES

    @property
    def sorts(self) -> Sequence[str]:
        return list(RUN_SORTS)

    def shown(self, runs: Sequence[RunSummary]) -> list[RunSummary]:
        """Return the runs that fit, in order."""
        words = self.text.lower().split()
        found = [
            run
            for run in runs
            if (not self.state or run.state == self.state) and all(_has(run, one) for one in words)
        ]
        return sorted(found, key=RUN_SORTS[self.sort])

    def on_page(self, runs: Sequence[RunSummary]) -> Sequence[RunSummary]:
        """Return the runs of the page."""
        return runs[self.page * RUNS_OF_A_PAGE : (self.page + 1) * RUNS_OF_A_PAGE]

    def pages(self, total: int) -> int:
        return max(1, -(-total // RUNS_OF_A_PAGE))

    def query(self, **changes: object) -> str:
        """Return the query of this table with changes."""
        values = {"q": self.text, "state": self.state, "sort": self.sort, "page": self.page}
        return urlencode({key: value for key, value in {**values, **changes}.items() if value})


def _has(run: RunSummary, word: str) -> bool:
    """Whether a run has a word in its name, or as `key=value` or a value in its config."""
    if word in run.name.lower():
        return True
    key, equals, value = word.partition("=")
    if equals:
        return any(
            name.lower().endswith(key) and one.lower().startswith(value)
            for name, one in run.config.items()
        )
    return any(word == one.lower() for one in run.config.values())

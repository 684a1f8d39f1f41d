"""The table of runs as a request asks for it: which runs, in which order, which page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.requests import LONGEST_TEXT, page_of

PAGE_SIZE = 100
STATES = ("running", "finished", "stopped", "failed", "died", "silent")
SORTS: dict[str, Callable[[RunSummary], tuple[float, str]]] = {
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
            sort if sort in SORTS else "updated",
            page_of(query),
        )

    @property
    def states(self) -> Sequence[str]:
        return STATES

    @property
    def sorts(self) -> Sequence[str]:
        return list(SORTS)

    def shown(self, runs: Sequence[RunSummary]) -> list[RunSummary]:
        """Return the runs that fit, in order."""
        words = self.text.lower().split()
        found = [
            run
            for run in runs
            if (not self.state or run.state == self.state) and all(_has(run, one) for one in words)
        ]
        return sorted(found, key=SORTS[self.sort])

    def page_of(self, runs: Sequence[RunSummary]) -> Sequence[RunSummary]:
        """Return the runs of the page."""
        return runs[self.page * PAGE_SIZE : (self.page + 1) * PAGE_SIZE]

    def pages(self, total: int) -> int:
        return max(1, -(-total // PAGE_SIZE))

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

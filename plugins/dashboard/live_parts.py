"""The live parts of pages: which files each is made of, so that none is made anew in vain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.plugins.dashboard.catalog import Catalog, RunSummary, stamp
from composer_mesh.plugins.dashboard.pages import render
from composer_mesh.plugins.dashboard.table import RunTable
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TIMELINE_FILE,
)
from composer_mesh.services.directory.status import EVENTS_FILE, STATUS_FILE

FILES = {
    "figures": (METRICS_FILE, EVALUATIONS_FILE, STATUS_FILE, SUMMARY_FILE),
    "charts": (METRICS_FILE, EVALUATIONS_FILE),
    "actors": (STATUS_FILE, EVENTS_FILE),
    "mesh": (STATUS_FILE, EVENTS_FILE),
    "timeline": (TIMELINE_FILE,),
    "events": (EVENTS_FILE,),
}
"""Files of a run that the parts of its pages are made of."""
PACED = frozenset({"runs", "charts"})
"""Parts that cost more the more runs there are, and the longer they are."""


@dataclass(frozen=True)
class PartsOfRuns:
    """The table of runs, as one part."""

    catalog: Catalog
    table: RunTable
    context: Callable[[RunTable, list[RunSummary]], dict[str, Any]]
    paced: Collection[str] = PACED

    def tokens(self) -> dict[str, object]:
        runs = self.catalog.runs()
        return {"runs": [(run.slug, run.state, run.updated) for run in runs]}

    def html(self, name: str) -> str:
        shown = self.table.shown(self.catalog.runs())
        return render(f"_{name}.html", self.context(self.table, shown))


@dataclass(frozen=True)
class PartsOfRun:
    """Parts of a page of one run, each made anew when one of its files has changed."""

    root: Path
    names: Collection[str]
    context: Callable[[Collection[str]], dict[str, Any]]
    """Returns what the templates of these parts show."""
    paced: Collection[str] = PACED

    def tokens(self) -> dict[str, object]:
        return {name: [stamp(self.root / file) for file in FILES[name]] for name in self.names}

    def html(self, name: str) -> str:
        return render(f"_{name}.html", self.context((name,)))

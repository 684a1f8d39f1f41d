"""What the pages of one run show, from its files: figures, charts, events, config, teacher replay.

The page about teacher replay shows what was queried, agreed, dropped and paid, and what came of it.
`mesh_tree` and `timeline` have the mesh and what it did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.configs.regular_files import TomlRefused, read_text
from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.charts import Chart
from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.plugins.dashboard.series import OUTCOMES, RECENT, Columns, curve
from composer_mesh.services.directory.channel_activity import WARNINGS
from composer_mesh.services.directory.resume import CONFIG_FILE
from composer_mesh.services.inspection.events_command import further
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import PairRow

BAD = ("_died", "_hung", "_given_up", "_failed")
GOOD = ("_restarted", "_finished", "_started")
EVENTS_OF_A_PAGE = 200
WARNINGS_SHOWN = 3


def figures_of(summary: RunSummary, run: OpenRun) -> dict[str, Any]:
    """Return the figures at the head of a run's page."""
    last = run.columns.last
    evaluations = summary.evaluations
    return {
        "summary": summary,
        "last": last,
        "median": run.columns.median,
        "recent": min(RECENT, len(run.columns.steps)),
        "first_success": evaluations[0] if evaluations else None,
        "success": evaluations[-1] if evaluations else None,
        "seconds": sum(one for one in run.columns.column("time/step_s") if one == one),
        "tokens": sum(one for one in run.columns.column("tokens/trained") if one == one),
        "usd": summary.usd,
        "warnings": [event_view(one) for one in run.warnings()[:WARNINGS_SHOWN]],
    }


def events(run: OpenRun, kind: str, page: int) -> dict[str, Any]:
    """Return a page of events, newest first, and the kinds that there are."""
    every = run.events()
    kinds = sorted({str(one.get("event", "")) for one in every})
    fitting = [one for one in every if not kind or one.get("event") == kind]
    first = page * EVENTS_OF_A_PAGE
    return {
        "events": [event_view(one) for one in fitting[first : first + EVENTS_OF_A_PAGE]],
        "kinds": kinds,
        "kind": kind,
        "page": page,
        "more": len(fitting) > first + EVENTS_OF_A_PAGE,
        "count": len(fitting),
    }


def event_view(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event as it is shown: with its tone, and the fields that its text lacks."""
    kind = str(event.get("event", ""))
    return {
        "time": event.get("time"),
        "kind": kind,
        "actor": event.get("actor", ""),
        "detail": event.get("detail", ""),
        "fields": further(event),
        "tone": _tone(kind),
    }


def _tone(kind: str) -> str:
    if kind in WARNINGS:
        return "warning"
    return "bad" if kind.endswith(BAD) else "good" if kind.endswith(GOOD) else ""


def config_text(root: Path) -> str:
    """Return the resolved config of a run as TOML, or why it cannot be read."""
    try:
        return read_text(root / CONFIG_FILE)
    except (OSError, TomlRefused) as error:
        return f"# {CONFIG_FILE} cannot be read: {error}"


PAIRS = 25
"""Pairs of a page."""
PARTS = 5
"""The first and the last of so many parts of the steps are compared."""
DROPPED, FAILED, HINTS = "replay/dropped/", "replay/failed/", "hints/"


def replay(root: Path, run: OpenRun, page: int) -> dict[str, Any]:
    """Return the totals, the curves, a page of the newest pairs, and error sites first and last."""
    columns = run.columns
    with RunReader(root) as reader:
        rows = reader.newest_pairs(PAIRS, page * PAIRS)
        states = reader.pair_states()
        kinds = error_kinds(reader, len(columns.steps))
        pairs = [_pair(row) for row in rows]
    return {
        "totals": _totals(columns),
        "charts": [chart for chart in _charts(columns) if not chart.empty],
        "pairs": pairs,
        "states": states,
        "kinds": kinds,
        "part": max(1, len(columns.steps) // PARTS),
        "page": page,
        "more": len(rows) == PAIRS,
        "usd": _last(columns.column("usd/total")),
    }


def error_kinds(reader: RunReader, steps: int) -> list[dict[str, Any]]:
    """Return error sites of a rollout by kind, in the first and in the last part of the steps."""
    part = max(1, steps // PARTS)
    first = reader.errors_of_steps(0, part - 1)
    last = reader.errors_of_steps(steps - part, steps - 1)
    found = []
    for kind in sorted({*first, *last} - {""}):
        before = first.get(kind, 0) / max(1, first.get("", 0))
        after = last.get(kind, 0) / max(1, last.get("", 0))
        change = after / before - 1 if before else math.nan
        found.append({"kind": kind, "before": before, "after": after, "change": change})
    return sorted(found, key=lambda one: -one["before"])


def _pair(row: PairRow) -> dict[str, Any]:
    return {
        "row": row,
        "pair": stored_pair(row),
        "step": None if row.step is None else row.step + 1,
    }


def _totals(columns: Columns) -> dict[str, Any]:
    def total(key: str) -> float:
        return math.fsum(value for value in columns.column(key) if not math.isnan(value))

    def named(prefix: str) -> dict[str, float]:
        keys = [key for key in columns.names() if key.startswith(prefix)]
        totals = {key.removeprefix(prefix).replace("_", " "): total(key) for key in keys}
        return {name: value for name, value in totals.items() if value}

    names = ("states", "skipped", "answers", "cached", "failures", "pairs", "expired", "saved_usd")
    return {
        **{name: total(f"replay/{name}") for name in names},
        "outcomes": named(OUTCOMES),
        "dropped": named(DROPPED),
        "failed": named(FAILED),
        "hints": named(HINTS),
    }


def _charts(columns: Columns) -> list[Chart]:
    places = columns.axis("step")

    def drawn(
        title: str, keys: Sequence[tuple[str, str]], note: str = "", costs: bool = False
    ) -> Chart:
        curves = [
            curve(label, places, columns.column(key), colour)
            for colour, (key, label) in enumerate(keys)
        ]
        return Chart(title, curves, low=0.0, note=note, costs=costs)

    return [
        drawn(
            "Queried", (("replay/states", "states queried"), ("replay/skipped", "not worth asking"))
        ),
        drawn(
            "Pairs of states",
            (("replay/pair_share", "share with a pair"),),
            "of the states decided",
        ),
        drawn("Pairs", (("replay/pairs", "trained"), ("replay/waiting", "waiting"))),
        drawn("Dollars", (("usd/total", "teachers and judges"),), costs=True),
        drawn("DPO accuracy", (("replay/accuracy", "chosen above rejected"),)),
        drawn("Hints", (("sdpo/views", "error sites with a hint"),)),
    ]


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0

"""What the page about teacher replay shows: what was queried, agreed, dropped and paid, and what
came of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_mesh.plugins.dashboard.charts import Chart
from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.plugins.dashboard.series import Columns, curve
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import PairRow

PAIRS = 25
"""Pairs of a page."""
PARTS = 5
"""The first and the last of so many parts of the steps are compared."""
OUTCOMES, DROPPED, FAILED, HINTS = "replay/outcome/", "replay/dropped/", "replay/failed/", "hints/"


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

    def drawn(title: str, keys: Sequence[tuple[str, str]], note: str = "") -> Chart:
        curves = [
            curve(label, places, columns.column(key), colour)
            for colour, (key, label) in enumerate(keys)
        ]
        return Chart(title, curves, low=0.0, note=note)

    return [
        drawn(
            "Queried", (("replay/states", "states queried"), ("replay/skipped", "not worth asking"))
        ),
        drawn("Agreement", (("replay/agreement", "share with a pair"),), "of the states queried"),
        drawn("Pairs", (("replay/pairs", "trained"), ("replay/waiting", "waiting"))),
        drawn("Dollars", (("usd/total", "teachers and judges"),)),
        drawn("DPO accuracy", (("replay/accuracy", "chosen above rejected"),)),
        drawn("Hints", (("sdpo/views", "error sites with a hint"),)),
    ]


def _last(values: Sequence[float]) -> float:
    return values[-1] if values else 0.0

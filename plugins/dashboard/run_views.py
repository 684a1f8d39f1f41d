"""What the pages of one run show, from its files: figures, charts, mesh, timeline, events.

The timeline has a lane for each actor: what it did in the last steps, and its idle time. The page
about teacher replay shows what was queried, agreed, dropped and paid, and what came of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from composer_mesh.configs.regular_files import TomlRefused, read_text
from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.charts import Chart
from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.plugins.dashboard.series import Columns, curve
from composer_mesh.services.directory.channel_activity import WARNINGS
from composer_mesh.services.directory.resume import CONFIG_FILE
from composer_mesh.services.inspection.events_command import further
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import PairRow

KINDS = {
    "play": "rollout",
    "score_group": "rollout",
    "train": "train",
    "publish": "sync",
    "pull": "sync",
    "adopt": "sync",
    "query": "ask",
    "score": "score",
    "write": "hint",
    "teacher_output": "teach",
    "take_teacher_output": "teach",
    "save": "checkpoint",
    "saved": "checkpoint",
    "keep": "checkpoint",
}
"""What is drawn for an endpoint; others are `other`."""
LEGEND = {
    "rollout": "plays rollouts",
    "train": "trains",
    "teach": "SDPO teacher's output",
    "ask": "asks teachers",
    "score": "reference log-probs",
    "hint": "writes hints",
    "sync": "weight sync",
    "checkpoint": "checkpoint",
    "other": "other calls",
}
HEIGHT = 18
MOST_LANES = 64


@dataclass(frozen=True)
class Lane:
    """One actor: its bars, and the share of the time in which it worked for the controller."""

    actor: str
    busy: float
    bars: Sequence[tuple[str, float, float, str]]
    """Kind, begin and length as shares of the whole, and what a pointer shows."""
    edges: Sequence[float]

    def svg(self) -> Markup:
        """Draw the lane over the width of the page."""
        parts = [
            f'<rect class="bar {kind}" x="{begin:.3%}" width="{max(length, 0.001):.3%}" '
            f'height="{HEIGHT}"><title>{escape(label)}</title></rect>'
            for kind, begin, length, label in self.bars
        ]
        parts += [
            f'<line class="edge" x1="{edge:.3%}" x2="{edge:.3%}" y2="{HEIGHT}"/>'
            for edge in self.edges
        ]
        label = f"{escape(self.actor)} worked {self.busy:.0%} of the time"
        return Markup(
            f'<svg class="lane" width="100%" height="{HEIGHT}" role="img" aria-label="{label}">'
            f"{''.join(parts)}</svg>"
        )


@dataclass(frozen=True)
class Timeline:
    """Lanes over some steps, `seconds` long."""

    lanes: Sequence[Lane]
    first: int
    last: int
    seconds: float

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds that are drawn, with what they mean."""
        drawn = {kind for lane in self.lanes for kind, *_ in lane.bars}
        return {kind: meaning for kind, meaning in LEGEND.items() if kind in drawn}


def timeline_of(lines: Sequence[Mapping[str, Any]]) -> Timeline | None:
    """Return the lanes of consecutive steps, as `timeline.jsonl` has them; None without any."""
    steps = [line for line in lines if _is_line(line)]
    if not steps:
        return None
    began = min(float(line["began"]) for line in steps)
    ended = max(float(line["ended"]) for line in steps)
    length = max(ended - began, 1e-9)
    edges = [(float(line["began"]) - began) / length for line in steps[1:]]
    spans: dict[str, list[tuple[str, float, float]]] = {}
    for line in steps:
        for actor, endpoint, begin, end in filter(_is_span, line["busy"]):
            begin, end = max(begin, began), min(end, ended)
            if end > begin and (actor in spans or len(spans) < MOST_LANES):
                spans.setdefault(actor, []).append((endpoint, begin, end))
    lanes = [_lane(actor, found, began, length, edges) for actor, found in sorted(spans.items())]
    return Timeline(lanes, int(steps[0]["step"]), int(steps[-1]["step"]), length)


def _lane(
    actor: str,
    spans: Sequence[tuple[str, float, float]],
    began: float,
    length: float,
    edges: Sequence[float],
) -> Lane:
    bars = [
        (
            KINDS.get(endpoint, "other"),
            (begin - began) / length,
            (end - begin) / length,
            f"{endpoint}, {end - begin:.3f} s",
        )
        for endpoint, begin, end in spans
    ]
    return Lane(actor, _covered([(a, b) for _, a, b in spans]) / length, bars, edges)


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that intervals cover together."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _is_line(line: Mapping[str, Any]) -> bool:
    numbers = all(isinstance(line.get(key), int | float) for key in ("step", "began", "ended"))
    return numbers and isinstance(line.get("busy"), list)


def _is_span(span: Any) -> bool:
    return (
        isinstance(span, list)
        and len(span) == 4
        and all(isinstance(one, str) for one in span[:2])
        and all(isinstance(one, int | float) for one in span[2:])
    )


BAD = ("_died", "_hung", "_given_up", "_failed")
GOOD = ("_restarted", "_finished", "_started")
EVENTS_OF_A_PAGE = 200
LATELY = 8
WARNINGS_SHOWN = 3
DEAD_SHOWN_S = 10.0
"""Seconds for which a process that has died is shown, also when another one has its place."""
UNKNOWN = ("version", "memory", "cpu", "queue", "calls", "pid")
"""What is not known of a process that is gone."""
TIMELINE_STEPS = (1, 3, 6, 12)


def figures_of(summary: RunSummary, run: OpenRun) -> dict[str, Any]:
    """Return the figures at the head of a run's page."""
    last = run.columns.last
    evaluations = summary.evaluations
    return {
        "summary": summary,
        "last": last,
        "first_success": evaluations[0] if evaluations else None,
        "success": evaluations[-1] if evaluations else None,
        "seconds": sum(one for one in run.columns.column("time/step_s") if one == one),
        "tokens": sum(one for one in run.columns.column("tokens/trained") if one == one),
        "usd": summary.usd,
        "warnings": [event_view(one) for one in run.warnings()[:WARNINGS_SHOWN]],
    }


def mesh(summary: RunSummary, run: OpenRun) -> dict[str, Any]:
    """Return the tree of a live run, and what happened to its actors lately."""
    about = run.mesh() if summary.live or summary.state == "silent" else None
    changes = run.changes_of_mesh()
    return {
        "summary": summary,
        "about": about,
        "hosts": [] if about is None else with_dead(hosts_of(about), changes, time.time()),
        "lately": [event_view(one) for one in changes[:LATELY]],
    }


def hosts_of(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the hosts of a mesh with all of their processes, also those that do not answer."""
    hosts = {host["name"]: list(host["processes"]) for host in about["hosts"]}
    for process in about["missing"]:
        actors = process["actors"]
        name = (actors[0].get("host") if actors else None) or "localhost"
        hosts.setdefault(name, []).append(process)
    return [
        {"name": name, "processes": [_process(one) for one in processes]}
        for name, processes in hosts.items()
    ]


def with_dead(
    hosts: list[dict[str, Any]], events: Sequence[Mapping[str, Any]], now: float
) -> list[dict[str, Any]]:
    """Return the hosts with the processes that died lately as dead ones, replaced or not."""
    died = {
        str(one.get("actor")): one
        for one in events
        if one.get("event") == "actor_died" and now - _time(one) < DEAD_SHOWN_S
    }
    shown = {process["name"]: process for host in hosts for process in host["processes"]}
    for name, event in died.items():
        if name in shown:
            shown[name]["state"] = "dead"
        elif hosts:
            fields = event.get("fields")
            of = fields.get("host") if isinstance(fields, dict) else None
            host = next((one for one in hosts if one["name"] == of), hosts[0])
            gone = {"name": name, "state": "dead", "doing": "", "restarts": 0}
            host["processes"].append(dict.fromkeys(UNKNOWN) | gone)
    return hosts


def _time(event: Mapping[str, Any]) -> float:
    found = event.get("time")
    return float(found) if isinstance(found, int | float) else 0.0


def _process(process: Mapping[str, Any]) -> dict[str, Any]:
    actor = process["actors"][0] if process["actors"] else {}
    return {
        "name": process["name"],
        "state": process["state"],
        "doing": actor.get("activity") or "",
        "version": actor.get("policy_version"),
        "restarts": process["restarts"],
        "memory": process["rss_bytes"],
        "cpu": process["cpu_percent"],
        "queue": process["queue_depth"],
        "calls": actor.get("outstanding"),
        "pid": process["pid"],
    }


def timeline(run: OpenRun, wanted: str | None) -> dict[str, Any]:
    """Return the lanes of the last steps, as many as are wanted if that is one of the choices."""
    steps = next((one for one in TIMELINE_STEPS if str(one) == wanted), TIMELINE_STEPS[1])
    found = timeline_of(run.timeline(steps))
    return {"timeline": found, "timeline_steps": steps, "choices": TIMELINE_STEPS}


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

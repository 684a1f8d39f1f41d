"""What the pages of one run show, from its files: figures, charts, mesh, timeline, events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.configs.regular_files import TomlRefused, read_text
from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.charts import charts_of_run
from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.plugins.dashboard.requests import ChartOptions
from composer_mesh.plugins.dashboard.timeline import timeline_of
from composer_mesh.services.directory.resume import CONFIG_FILE
from composer_mesh.services.inspection.events_command import further

BAD = ("_died", "_hung", "_given_up", "_failed")
GOOD = ("_restarted", "_finished", "_started")
EVENTS_OF_A_PAGE = 200
LATELY = 8
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
    }


def charts(summary: RunSummary, run: OpenRun, options: ChartOptions) -> dict[str, Any]:
    """Return the charts of a run."""
    found = charts_of_run(run.columns, summary.evaluations, options.axis, options.smoothing)
    return {"charts": found}


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


def timeline(run: OpenRun, steps: int) -> dict[str, Any]:
    """Return the lanes of the last steps."""
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
        "tone": "bad" if kind.endswith(BAD) else "good" if kind.endswith(GOOD) else "",
    }


def config_text(root: Path) -> str:
    """Return the resolved config of a run as TOML, or why it cannot be read."""
    try:
        return read_text(root / CONFIG_FILE)
    except (OSError, TomlRefused) as error:
        return f"# {CONFIG_FILE} cannot be read: {error}"


def steps_wanted(text: str | None, known: Sequence[int] = TIMELINE_STEPS) -> int:
    return next((one for one in known if str(one) == text), known[1])

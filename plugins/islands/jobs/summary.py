"""One summary over all islands, from what each has left in its run directory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.islands.jobs.directory import IslandsDirectory
from composer_mesh.plugins.islands.jobs.ports import ReplicaState
from composer_mesh.services.directory.report import METRICS_FILE, read_metrics
from composer_mesh.services.directory.status import read_status

SUMMARY_FILE = "summary.json"
MOST_BYTES = 1 << 24
COUNTS = ("merged", "lost", "late", "dropped", "refused", "retries", "bytes_sent", "bytes_received")


def summarize(
    place: IslandsDirectory, states: Sequence[ReplicaState], wall_s: float
) -> dict[str, Any]:
    """Return the summary: totals, mean success over the islands, and an entry for each of them.

    An island without a state, which was not started this time, has the one of its own status.
    """
    known = {one.rank: one for one in states}
    islands = [
        _island(run, known.get(rank) or _earlier(rank, run)) for rank, run in enumerate(place.runs)
    ]
    return {
        "islands": len(islands),
        "finished": sum(one["state"] == "finished" for one in islands),
        "steps": sum(one["steps"] for one in islands),
        "rollouts": sum(one["rollouts"] for one in islands),
        "wall_s": round(wall_s, 3),
        "eval": {when: _mean(islands, when) for when in ("initial", "final")},
        "round": max((one["round"] for one in islands), default=0),
        **{name: sum(one[name] for one in islands) for name in COUNTS},
        "time_communicating": _share(islands),
        "each": islands,
    }


def write_summary(output: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary to the directory of all islands atomically."""
    write_whole(output / SUMMARY_FILE, (json.dumps(summary, indent=2) + "\n").encode())


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the summary as a printable table, one row for each island."""
    table = Table(title=Text("islands"), box=SIMPLE_HEAD)
    for name in ("island", "state", "steps", "round", "lost", "held-out", "MB sent"):
        table.add_column(name)
    for one in summary["each"]:
        final = one["eval"]["final"]
        success = "" if final is None else f"{final['success']:.1%}"
        words = (one["rank"], one["state"], one["steps"], one["round"], one["lost"], success)
        table.add_row(*map(str, words), f"{one['bytes_sent'] / 1e6:.1f}")
    return table


def _earlier(rank: int, run: Path) -> ReplicaState:
    """Return the state of an island that was started by another command."""
    status = read_status(run)
    if status is None:
        return ReplicaState(rank, "waiting")
    known = {"finished": "finished", "stopped": "stopped"}
    state: Any = "running" if status.live else known.get(status.state, "failed")
    return ReplicaState(rank, state, status.step)


def _island(run: Path, state: ReplicaState) -> dict[str, Any]:
    metrics = read_metrics(run / METRICS_FILE)
    return {
        "rank": state.rank,
        "output": str(run),
        "state": state.state,
        "cause": state.cause,
        "steps": len(metrics),
        "rollouts": int(sum(step.get("rollouts/count") or 0 for step in metrics)),
        "eval": _evaluations(run),
        "round": int(metrics[-1].get("islands/round") or 0) if metrics else 0,
        **{name: _total(metrics, f"islands/{name}") for name in COUNTS},
        "waited_s": round(sum(step.get("time/islands_s") or 0.0 for step in metrics), 3),
        "trained_s": round(sum(step.get("time/step_s") or 0.0 for step in metrics), 3),
    }


def _total(metrics: Sequence[Mapping[str, Any]], name: str) -> int:
    return int(sum(step.get(name) or 0 for step in metrics))


def _evaluations(output: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(output / SUMMARY_FILE, MOST_BYTES))["eval"]
    except (FileNotFoundError, KeyError):
        return {"initial": None, "final": None}
    return {when: found.get(when) for when in ("initial", "final")}


def _mean(islands: Sequence[Mapping[str, Any]], when: str) -> dict[str, Any] | None:
    """Return the success over all islands' episodes, which are the same held-out ones."""
    found = [one["eval"][when] for one in islands if one["eval"][when] is not None]
    if not found:
        return None
    success = sum(one["success"] for one in found) / len(found)
    return {"success": success, "episodes": sum(one["episodes"] for one in found)}


def _share(islands: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of all steps' time that was spent waiting for rounds."""
    trained = sum(one["trained_s"] for one in islands)
    return sum(one["waited_s"] for one in islands) / trained if trained else 0.0

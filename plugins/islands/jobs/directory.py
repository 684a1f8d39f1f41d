"""The directory of several islands: `islands.json` and a run directory for each.

DIR/islands.json   the address of the store or lighthouse, and the number of islands
DIR/island-0/ ...  a run directory like any other
DIR/summary.json   over all islands, when they have ended

The summary is made of what each island has left in its run directory. `composer-mesh tree` of the
directory shows the mesh of each live one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.islands.jobs.ports import IslandState
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import METRICS_FILE, read_metrics
from composer_mesh.services.directory.status import RunUnavailable, read_status
from composer_mesh.services.inspection.tree import FIRST_LOOK_S, REFRESH_S, Viewer
from composer_mesh.services.inspection.tree_page import MeshPage

ISLANDS_FILE = "islands.json"
MOST_BYTES = 1 << 20
MeetBy = Literal["store", "lighthouse"]
"""The key of `[islands]` that says where islands meet."""


@dataclass(frozen=True)
class IslandsDirectory:
    """What `islands.json` says."""

    root: Path
    address: str
    count: int
    by: MeetBy = "store"

    def run(self, rank: int) -> Path:
        """Return the run directory of an island."""
        return self.root / f"island-{rank}"

    @property
    def runs(self) -> list[Path]:
        """The run directories by rank."""
        return [self.run(rank) for rank in range(self.count)]

    def write(self) -> None:
        """Write the file atomically."""
        about = {self.by: self.address, "islands": self.count}
        write_whole(self.root / ISLANDS_FILE, (json.dumps(about, indent=1) + "\n").encode())


def islands_in(root: Path) -> IslandsDirectory | None:
    """Return the islands of a directory; None if it has none.

    Raises RunDirectoryError for a file that is unreadable.
    """
    try:
        about = json.loads(read_regular(root / ISLANDS_FILE, MOST_BYTES))
        by: MeetBy = "lighthouse" if "lighthouse" in about else "store"
        return IslandsDirectory(root, str(about[by]), int(about["islands"]), by)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{root / ISLANDS_FILE} does not say where its islands are ({error!r}): restore it "
            "from a copy, or look at one island's directory"
        ) from None


SUMMARY_FILE = "summary.json"
MOST_SUMMARY_BYTES = 1 << 24
COUNTS = ("merged", "lost", "late", "dropped", "refused", "retries", "bytes_sent", "bytes_received")


def summarize(
    place: IslandsDirectory, states: Sequence[IslandState], wall_s: float
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


def _earlier(rank: int, run: Path) -> IslandState:
    """Return the state of an island that was started by another command."""
    status = read_status(run)
    if status is None:
        return IslandState(rank, "waiting")
    known = {"finished": "finished", "stopped": "stopped"}
    state: Any = "running" if status.live else known.get(status.state, "failed")
    return IslandState(rank, state, status.step)


def _island(run: Path, state: IslandState) -> dict[str, Any]:
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
        found = json.loads(read_regular(output / SUMMARY_FILE, MOST_SUMMARY_BYTES))["eval"]
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


def islands_tree(place: IslandsDirectory, as_json: bool, watch: bool) -> int:
    """Print every island, once or until all have ended; raises `RunUnavailable` if none is live."""
    if not _live(place):
        raise RunUnavailable(
            f"no island in {place.root} is live: continue with composer-mesh islands --resume"
        )
    viewers = {rank: Viewer(place.run(rank)) for rank in range(place.count)}
    for rank in _live(place):
        viewers[rank].look()
    time.sleep(FIRST_LOOK_S)
    console = Console()
    try:
        for views in _views(place, viewers, watch):
            if as_json:
                sys.stdout.write(json.dumps({place.by: place.address, "islands": views}) + "\n")
                sys.stdout.flush()
            else:
                _print(console, viewers, views)
    except KeyboardInterrupt:
        pass
    return 0


def _views(
    place: IslandsDirectory, viewers: dict[int, Viewer], watch: bool
) -> Iterator[list[dict[str, Any]]]:
    while live := _live(place):
        yield [_about(place, rank, viewers[rank], rank in live) for rank in range(place.count)]
        if not watch:
            return
        time.sleep(REFRESH_S)


def _about(place: IslandsDirectory, rank: int, viewer: Viewer, live: bool) -> dict[str, Any]:
    """Return an island's rank, state and round, and its mesh if it is live."""
    metrics = read_metrics(place.run(rank) / METRICS_FILE)
    status = read_status(place.run(rank))
    about = {
        "rank": rank,
        "state": "not started" if status is None else status.state,
        "step": len(metrics),
        "round": (metrics[-1].get("islands/round") or 0) if metrics else 0,
    }
    return {**about, "mesh": viewer.look()} if live else about


def _live(place: IslandsDirectory) -> list[int]:
    found = [(rank, read_status(place.run(rank))) for rank in range(place.count)]
    return [rank for rank, status in found if status is not None and status.live]


def _print(console: Console, viewers: dict[int, Viewer], views: list[dict[str, Any]]) -> None:
    for one in views:
        words = f"island {one['rank']}: {one['state']}, step {one['step']}, round {one['round']}"
        console.print(words, highlight=False)
        if "mesh" in one:
            console.print(MeshPage(one["mesh"], viewers[one["rank"]].recent_events()))

"""`composer-mesh tree` of the directory of several islands: the mesh of each live one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from composer_mesh.plugins.islands.jobs.directory import IslandsDirectory
from composer_mesh.services.directory.report import METRICS_FILE, read_metrics
from composer_mesh.services.directory.status import RunUnavailable, read_status
from composer_mesh.services.inspection.tree import FIRST_LOOK_S, REFRESH_S, Viewer
from composer_mesh.services.inspection.tree_page import MeshPage


def islands_tree(place: IslandsDirectory, as_json: bool, watch: bool) -> int:
    """Print every island, once or until all have ended; raises `RunUnavailable` if none is live."""
    if not _live(place):
        raise RunUnavailable(
            f"no island in {place.root} is live: go on with composer-mesh islands --resume"
        )
    viewers = {rank: Viewer(place.run(rank)) for rank in range(place.count)}
    for rank in _live(place):
        viewers[rank].look()
    time.sleep(FIRST_LOOK_S)
    console = Console()
    try:
        for told in _views(place, viewers, watch):
            if as_json:
                sys.stdout.write(json.dumps({place.by: place.address, "islands": told}) + "\n")
                sys.stdout.flush()
            else:
                _print(console, viewers, told)
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


def _print(console: Console, viewers: dict[int, Viewer], told: list[dict[str, Any]]) -> None:
    for one in told:
        words = f"island {one['rank']}: {one['state']}, step {one['step']}, round {one['round']}"
        console.print(words, highlight=False)
        if "mesh" in one:
            console.print(MeshPage(one["mesh"], viewers[one["rank"]].recent_events()))

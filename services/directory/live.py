"""Finding the run that a command looks into, and whether it goes on.

It reads a run's status and its claim on its directory; it asks no process and no mesh.
"""

import shlex
from pathlib import Path

from composer_mesh.mesh.processes import is_alive
from composer_mesh.services.directory.claim import RUNS
from composer_mesh.services.directory.status import RunStatus, newest_live_run, read_status

EVENTS_FILE = "events.jsonl"


class RunUnavailable(Exception):
    """What was asked of a run cannot be had now: why, and what to do about it."""


def live_run(run: Path | None) -> Path:
    """The run directory that was named, or the newest, where that run is live."""
    found = newest_live_run(RUNS) if run is None else run
    if found is not None and (status := read_status(found)) is not None and status.live:
        return found
    looked = f"status.json of a live run in {run}" if run else f"a live run under {RUNS}/"
    raise RunUnavailable(
        f"looked for {looked} and found none: start one with composer-mesh train CONFIG"
    )


def commands_for(run: Path, telemetry: bool) -> list[str]:
    """What to type in a second terminal to look into a run."""
    place = shlex.quote(str(run))
    looks = [
        f"composer-mesh tree {place} --watch",
        f"composer-mesh events {place} --follow",
        f"composer-mesh scale {place} generator=N",
        f"composer-mesh stop {place}",
        f"composer-mesh stacks {place}",
        f"composer-mesh tui {place}",
    ]
    query = f'composer-mesh query {place} "SELECT * FROM actors"'
    return [*looks, query] if telemetry else looks


def status_of(run: Path) -> RunStatus:
    """What the controller last said about a run."""
    status = read_status(run)
    if status is None:
        raise RunUnavailable(f"{run} holds no readable status.json: has the run been removed?")
    return status


def goes_on(run: Path) -> bool:
    """Whether a run is live, or about to be: it has its directory before it has a status."""
    status = read_status(run)
    if status is not None and status.live:
        return True
    claimant = _claimant(run)
    return claimant is not None and (status is None or claimant != status.pid)


def _claimant(run: Path) -> int | None:
    """The living process that claimed the directory last."""
    try:
        pid = int((run / ".lock").read_text())
    except (OSError, ValueError):
        return None
    return pid if is_alive(pid) else None

"""Lookup of the live run that a command inspects.

It reads the run's status file and directory lock, without contacting any process.
"""

import shlex
from pathlib import Path

from composer_mesh.mesh.processes import is_alive
from composer_mesh.services.directory.claim import RUNS, locker
from composer_mesh.services.directory.status import RunStatus, newest_live_run, read_status

EVENTS_FILE = "events.jsonl"


class RunUnavailable(Exception):
    """A run cannot serve the request now; the message says why and what to do about it."""


def live_run(run: Path | None) -> Path:
    """Return the named run directory, or the newest one; raise RunUnavailable if it is not live."""
    found = newest_live_run(RUNS) if run is None else run
    if found is not None and (status := read_status(found)) is not None and status.live:
        return found
    looked = f"status.json of a live run in {run}" if run else f"a live run under {RUNS}/"
    raise RunUnavailable(
        f"looked for {looked} and found none: start one with composer-mesh train CONFIG"
    )


def commands_for(run: Path, telemetry: bool) -> list[str]:
    """Return the commands that inspect a run from a second terminal."""
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
    """Return the last status that the controller wrote; raise RunUnavailable without one."""
    status = read_status(run)
    if status is None:
        raise RunUnavailable(f"{run} holds no readable status.json: has the run been removed?")
    return status


def goes_on(run: Path) -> bool:
    """Return whether a run is live or starting: its directory is locked before it has a status."""
    status = read_status(run)
    if status is not None and status.live:
        return True
    claimant = _claimant(run)
    return claimant is not None and (status is None or claimant != status.pid)


def _claimant(run: Path) -> int | None:
    """Return the live process that last locked the directory."""
    pid = locker(run)
    return pid if pid is not None and is_alive(pid) else None

"""`composer-mesh tree`: shows the live mesh of a run from another terminal.

Reads the run's status file, Monarch's admin server and the operating system. Read-only: it cannot
change a run, and starts no Monarch runtime of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from composer_mesh.mesh.admin import AdminUnreachable, MeshTree, TlsFiles, read_mesh
from composer_mesh.mesh.processes import cpu_seconds, resident_bytes
from composer_mesh.services.directory.live import EVENTS_FILE, live_run, status_of
from composer_mesh.services.directory.status import RunStatus, read_status
from composer_mesh.services.inspection.events_command import Lines, event_of
from composer_mesh.services.inspection.mesh_view import Usage, merge, pids_of
from composer_mesh.services.inspection.tree_page import MeshPage
from composer_mesh.services.inspection.usage import CpuMeter

REFRESH_S = 1.0
FIRST_LOOK_S = 0.25
"""Interval over which CPU is measured before the first output."""
LATELY = 8
"""Number of events shown below the mesh."""
TOLD = ("_died", "_hung", "_given_up", "_failed", "_lost", "_poisoned", "_restarted", "_resized")
"""Suffixes of the event kinds that report changes of the mesh."""


def tree_command(run: Path | None, as_json: bool = False, watch: bool = False) -> int:
    """Print the mesh of a live run, once or until it ends; return the exit status."""
    console = Console()
    viewer = Viewer(live_run(run))
    viewer.look()
    time.sleep(FIRST_LOOK_S)
    try:
        if not watch:
            _print(viewer, viewer.look(), console, as_json)
        elif as_json or not console.is_terminal:
            for about in _views(viewer):
                _print(viewer, about, console, as_json)
        else:
            _watch(viewer, console)
    except KeyboardInterrupt:
        pass
    return 0


class Viewer:
    """Snapshots of a run; CPU usage is measured between snapshots."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._meter = CpuMeter[int]()
        self._lines = Lines(run / EVENTS_FILE)
        self._lately: deque[dict[str, Any]] = deque(maxlen=LATELY)

    def look(self) -> dict[str, Any]:
        """Return the run and its mesh as one plain object. Waits for the admin server."""
        status = status_of(self.run)
        return merge(self.run.name, status, _mesh(status), self._usage(status))

    def recent_events(self) -> list[dict[str, Any]]:
        """Return the last events about deaths and recoveries, newest last."""
        for line in self._lines.new():
            event = event_of(line)
            if event is not None and str(event.get("event", "")).endswith(TOLD):
                self._lately.append(event)
        return list(self._lately)

    def _usage(self, status: RunStatus) -> Usage:
        if not status.here:
            return Usage()
        pids = pids_of(status)
        memory = {pid: used for pid in pids if (used := resident_bytes(pid)) is not None}
        cpu = {pid: spent for pid in pids if (spent := cpu_seconds(pid)) is not None}
        return Usage(self._meter.look(cpu), memory)


def _mesh(status: RunStatus) -> MeshTree | None:
    try:
        return (
            read_mesh(status.admin_url, TlsFiles.of_status(status.admin_tls))
            if status.admin_url and status.here
            else None
        )
    except AdminUnreachable:
        return None


def _print(viewer: Viewer, about: dict[str, Any], console: Console, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(about) + "\n")
        sys.stdout.flush()
    else:
        console.print(MeshPage(about, viewer.recent_events()))


def _watch(viewer: Viewer, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        for about in _views(viewer):
            live.update(MeshPage(about, viewer.recent_events()), refresh=True)


def _views(viewer: Viewer) -> Iterator[dict[str, Any]]:
    """Yield snapshots of the run until it ends."""
    while (status := read_status(viewer.run)) is not None and status.live:
        yield viewer.look()
        time.sleep(REFRESH_S)

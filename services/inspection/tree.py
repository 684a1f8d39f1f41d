"""`composer-mesh tree`: shows the live mesh of a run from another terminal.

Reads the run's status file, Monarch's admin server and the operating system. Read-only: it cannot
change a run, and starts no Monarch runtime of its own.

A run and its mesh as one plain object, as printed by `composer-mesh tree --json`.

Joins the controller's status with what Monarch's admin server and the operating system report about
the same processes. docs/tree.md documents each key; `tree_page` renders it.

CPU usage of local processes between two measurements.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.live import Live

from composer_mesh.mesh.admin import (
    CONTROLLER_PROC,
    ActorNode,
    AdminUnreachable,
    HostNode,
    MeshTree,
    ProcNode,
    TlsFiles,
    read_mesh,
)
from composer_mesh.mesh.machine import NAME
from composer_mesh.mesh.processes import cpu_seconds, resident_bytes
from composer_mesh.services.directory.status import (
    EVENTS_FILE,
    ActorStatus,
    RunStatus,
    is_live,
    live_run,
    read_status,
    status_of,
)
from composer_mesh.services.inspection.events_command import FollowedLines, event_of
from composer_mesh.services.inspection.tree_page import MeshPage

FORMAT = 1
"""Increased when a key is removed or changes its meaning; not for a new key."""


NOT_SHOWN = ("actors", "hosts", "admin_tls")
"""Keys of a status that the object reports elsewhere, or omits."""
OF_ITS_PROCESS = ("rss_bytes", "cpu_percent")


@dataclass(frozen=True)
class ProcessUsage:
    """Resource usage of processes on the controller's machine, by pid."""

    cpu_percent: Mapping[int, float] = field(default_factory=dict)
    rss_bytes: Mapping[int, int] = field(default_factory=dict)


def merge(
    name: str, status: RunStatus, mesh: MeshTree | None, usage: ProcessUsage | None = None
) -> dict[str, Any]:
    """Join the status of a run with the live mesh; without a mesh, return the status alone."""
    about = {key: value for key, value in asdict(status).items() if key not in NOT_SHOWN}
    joined = _Joined(status, usage or ProcessUsage())
    hosts = [joined.on(host).host(host) for host in mesh.hosts] if mesh else []
    hosts.sort(key=lambda host: (host["name"] != NAME, host["name"]))
    listed = {one["name"] for host in hosts for one in host["processes"]}
    missing = [joined.process(actor) for actor in status.actors if actor.name not in listed]
    return {
        "format": FORMAT,
        "run": name,
        **about,
        "mesh": mesh is not None,
        "hosts": hosts,
        "missing": missing,
    }


def pids_of(status: RunStatus) -> list[int]:
    """Return the pids of a run's processes on the controller's machine, including its own."""
    local = (actor.pid for actor in status.actors if actor.with_controller)
    return [status.pid, *(pid for pid in local if pid is not None)]


def owner_of(proc: ProcNode, status: RunStatus) -> ActorStatus | None:
    """Return the actor that a process was started for, found by name; None where there is none."""
    known = {_monarch_name(actor.name): actor for actor in status.actors}
    rankless = proc.name.rpartition("-")[0]
    names = (*(actor.name for actor in proc.actors), rankless, proc.name)
    return next((known[name] for name in names if name in known), None)


def is_controllers(host: HostNode, status: RunStatus) -> bool:
    """Whether this is the controller's host; the controller has names for all other hosts."""
    return host.name.startswith("unix:") or status.hosts.get(host.name) == NAME


def _monarch_name(name: str) -> str:
    """Convert a name as `mesh.actor.monarch_name` does; this module must not import Monarch."""
    return name.replace(".", "_")


@dataclass(frozen=True)
class _Joined:
    """The run's own status, to which other reports are joined."""

    status: RunStatus
    usage: ProcessUsage

    def on(self, host: HostNode) -> _Joined:
        """Return the view for one host; usage is only known on the controller's host."""
        return self if is_controllers(host, self.status) else _Joined(self.status, ProcessUsage())

    def _name(self, host: HostNode) -> str:
        known = self.status.hosts.get(host.name)
        return known or (NAME if is_controllers(host, self.status) else host.name)

    def host(self, host: HostNode) -> dict[str, Any]:
        ours = [(proc, owner_of(proc, self.status)) for proc in host.procs]
        own = CONTROLLER_PROC if is_controllers(host, self.status) else ""
        shown = [(proc, owner) for proc, owner in ours if owner is not None or proc.name == own]
        others = [proc for proc, owner in ours if owner is None and proc.name != own]
        processes = [self._listed(proc, owner) for proc, owner in shown]
        return {
            "name": self._name(host),
            "processes": sorted(processes, key=self._place),
            "system": {
                "processes": len(others),
                "actors": sum(proc.system_actors + len(proc.actors) for proc in others)
                + sum(proc.system_actors for proc, _ in shown),
            },
        }

    def process(self, actor: ActorStatus, proc: ProcNode | None = None) -> dict[str, Any]:
        """Return a process with its actor; `proc` is Monarch's node, where it lists one."""
        node = _node(proc, actor.name)
        state = _state(actor, proc, node)
        return {
            "name": actor.name,
            **self._used_by(actor, proc),
            "state": state,
            "restarts": actor.restarts,
            "actors": [_actor(actor, state, node)],
        }

    def _listed(self, proc: ProcNode, owner: ActorStatus | None) -> dict[str, Any]:
        if owner is not None:
            return self.process(owner, proc)
        used = self._used(self.status.pid, proc)
        return {"name": "controller", **used, "state": "ready", "restarts": 0, "actors": []}

    def _used_by(self, actor: ActorStatus, proc: ProcNode | None) -> dict[str, Any]:
        """Return usage measured on the controller's host, or as reported by another host."""
        if actor.with_controller:
            return self._used(actor.pid, proc)
        used = _Joined(self.status, ProcessUsage())._used(actor.pid, proc)
        reported = {key: getattr(actor, key) for key in OF_ITS_PROCESS}
        return used | {key: value for key, value in reported.items() if value is not None}

    def _used(self, pid: int | None, proc: ProcNode | None) -> dict[str, Any]:
        reported = proc.rss_bytes if proc is not None and proc.reachable else None
        return {
            "pid": pid,
            "rss_bytes": self.usage.rss_bytes.get(pid, reported) if pid is not None else reported,
            "cpu_percent": self.usage.cpu_percent.get(pid) if pid is not None else None,
            "queue_depth": proc.queue_depth if proc is not None and proc.reachable else None,
        }

    def _place(self, process: Mapping[str, Any]) -> int:
        """Sort key: the controller first, then in the order of the status."""
        names = ["controller", *(actor.name for actor in self.status.actors)]
        return names.index(process["name"])


def _node(proc: ProcNode | None, name: str) -> ActorNode | None:
    nodes = proc.actors if proc else ()
    return next((node for node in nodes if node.name == _monarch_name(name)), None)


def _actor(actor: ActorStatus, state: str, node: ActorNode | None) -> dict[str, Any]:
    return {
        **{key: value for key, value in asdict(actor).items() if key not in OF_ITS_PROCESS},
        "state": state,
        "queue_depth": node.queue_depth if node else None,
        "messages_processed": node.messages_processed if node else None,
    }


def _state(actor: ActorStatus, proc: ProcNode | None, node: ActorNode | None) -> str:
    if proc is not None and not proc.reachable:
        return "dead"
    if node is not None and node.status.startswith("failed"):
        return "failed"
    return actor.state


K = TypeVar("K", bound=Hashable)


class CpuMeter(Generic[K]):
    """CPU usage of processes between two measurements, in percent of one core."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[K, tuple[float, float]] = {}

    def look(self, used: Mapping[K, float]) -> dict[K, float]:
        """Return the percentages since the last call, from each process's CPU seconds so far.

        Processes that were not in the last call are left out.
        """
        now, before = self._clock(), self._last
        self._last = {key: (now, seconds) for key, seconds in used.items()}
        return {
            key: round(100 * (seconds - before[key][1]) / (now - before[key][0]), 1)
            for key, seconds in used.items()
            if key in before
            and now > before[key][0]
            and seconds >= before[key][1]  # less: the pid was reused by another process
        }


REFRESH_S = 1.0
FIRST_LOOK_S = 0.25
"""Interval over which CPU is measured before the first output."""
LATELY = 8
"""Number of events shown below the mesh."""
MESH_CHANGES = (
    "_died",
    "_hung",
    "_given_up",
    "_failed",
    "_lost",
    "_poisoned",
    "_restarted",
    "_resized",
)
"""Suffixes of the event kinds that report changes of the mesh."""


def tree_command(run: Path, as_json: bool = False, watch: bool = False) -> int:
    """Print the mesh of a run, once or until it ends; return the exit status.

    Of a run that is not live the last status is printed, then NotRunning is raised.
    """
    console, viewer = Console(), Viewer(run)
    if not is_live(run):
        if read_status(run) is not None:
            _print(viewer, viewer.look(), console, as_json)
        live_run(run)
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
        self._lines = FollowedLines(run / EVENTS_FILE)
        self._lately: deque[dict[str, Any]] = deque(maxlen=LATELY)

    def look(self) -> dict[str, Any]:
        """Return the run and its mesh as one plain object. Waits for the admin server.

        Of a run that has ended it is what the controller wrote last.
        """
        status = status_of(self.run)
        return merge(self.run.name, status, _mesh(status), self._usage(status))

    def recent_events(self) -> list[dict[str, Any]]:
        """Return the last events about deaths and recoveries, newest last."""
        for line in self._lines.new():
            event = event_of(line)
            if event is not None and str(event.get("event", "")).endswith(MESH_CHANGES):
                self._lately.append(event)
        return list(self._lately)

    def _usage(self, status: RunStatus) -> ProcessUsage:
        if not (status.here and status.live):
            return ProcessUsage()
        pids = pids_of(status)
        memory = {pid: used for pid in pids if (used := resident_bytes(pid)) is not None}
        cpu = {pid: spent for pid in pids if (spent := cpu_seconds(pid)) is not None}
        return ProcessUsage(self._meter.look(cpu), memory)


def _mesh(status: RunStatus) -> MeshTree | None:
    try:
        return (
            read_mesh(status.admin_url, TlsFiles.of_status(status.admin_tls))
            if status.admin_url and status.here and status.live
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

"""A run and its mesh as one plain object, as printed by `composer-mesh tree --json`.

Joins the controller's status with what Monarch's admin server and the operating system report about
the same processes. docs/tree.md documents each key; `tree_page` renders it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_mesh.mesh.admin import CONTROLLER_PROC, ActorNode, HostNode, MeshTree, ProcNode
from composer_mesh.mesh.machine import NAME
from composer_mesh.services.directory.status import ActorStatus, RunStatus

FORMAT = 1
"""Increased when a key is removed or changes its meaning; not for a new key."""


NOT_SHOWN = ("actors", "hosts", "admin_tls")
"""Keys of a status that the object reports elsewhere, or omits."""
OF_ITS_PROCESS = ("rss_bytes", "cpu_percent")


@dataclass(frozen=True)
class Usage:
    """Resource usage of processes on the controller's machine, by pid."""

    cpu_percent: Mapping[int, float] = field(default_factory=dict)
    rss_bytes: Mapping[int, int] = field(default_factory=dict)


def merge(
    name: str, status: RunStatus, mesh: MeshTree | None, usage: Usage | None = None
) -> dict[str, Any]:
    """Join the status of a run with the live mesh; without a mesh, return the status alone."""
    about = {key: value for key, value in asdict(status).items() if key not in NOT_SHOWN}
    joined = _Joined(status, usage or Usage())
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
    beside = (actor.pid for actor in status.actors if actor.with_controller)
    return [status.pid, *(pid for pid in beside if pid is not None)]


def owner_of(proc: ProcNode, status: RunStatus) -> ActorStatus | None:
    """Return the actor that a process was started for, found by name; None where there is none."""
    known = {_told(actor.name): actor for actor in status.actors}
    rankless = proc.name.rpartition("-")[0]
    names = (*(actor.name for actor in proc.actors), rankless, proc.name)
    return next((known[name] for name in names if name in known), None)


def is_controllers(host: HostNode, status: RunStatus) -> bool:
    """Whether this is the controller's host; the controller has names for all other hosts."""
    return host.name.startswith("unix:") or status.hosts.get(host.name) == NAME


def _told(name: str) -> str:
    """Convert a name as `mesh.actor.monarch_name` does; this module must not import Monarch."""
    return name.replace(".", "_")


@dataclass(frozen=True)
class _Joined:
    """The run's own status, to which other reports are joined."""

    status: RunStatus
    usage: Usage

    def on(self, host: HostNode) -> _Joined:
        """Return the view for one host; usage is only known on the controller's host."""
        return self if is_controllers(host, self.status) else _Joined(self.status, Usage())

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
        used = _Joined(self.status, Usage())._used(actor.pid, proc)
        told = {key: getattr(actor, key) for key in OF_ITS_PROCESS}
        return used | {key: value for key, value in told.items() if value is not None}

    def _used(self, pid: int | None, proc: ProcNode | None) -> dict[str, Any]:
        told = proc.rss_bytes if proc is not None and proc.reachable else None
        return {
            "pid": pid,
            "rss_bytes": self.usage.rss_bytes.get(pid, told) if pid is not None else told,
            "cpu_percent": self.usage.cpu_percent.get(pid) if pid is not None else None,
            "queue_depth": proc.queue_depth if proc is not None and proc.reachable else None,
        }

    def _place(self, process: Mapping[str, Any]) -> int:
        """Sort key: the controller first, then in the order of the status."""
        names = ["controller", *(actor.name for actor in self.status.actors)]
        return names.index(process["name"])


def _node(proc: ProcNode | None, name: str) -> ActorNode | None:
    nodes = proc.actors if proc else ()
    return next((node for node in nodes if node.name == _told(name)), None)


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

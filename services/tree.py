"""`composer-mesh tree`: the live mesh of a run, seen from another terminal.

It joins what the controller says in its status file with what Monarch's admin server says about the
same actors. It only reads: nothing here can change a run, and it starts no Monarch of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.tree import Tree

from composer_mesh.mesh.admin import (
    CONTROLLER_PROC,
    AdminUnreachable,
    HostNode,
    MeshTree,
    ProcNode,
    read_mesh,
)
from composer_mesh.services.status import ActorStatus, RunStatus, newest_live_run, read_status

RUNS = Path("runs")
REFRESH_S = 1.0
MIB = 1 << 20


def tree_command(run: Path | None, as_json: bool = False, watch: bool = False) -> int:
    """Print the mesh of a live run, once or until it ends. The result is the exit status."""
    found = _live_run(run)
    if found is None:
        sys.stderr.write(_nothing_found(run) + "\n")
        return 1
    try:
        if watch:
            _watch(found, as_json)
        else:
            _print(describe_run(found), as_json)
    except KeyboardInterrupt:
        pass
    return 0


def _live_run(run: Path | None) -> Path | None:
    if run is None:
        return newest_live_run(RUNS)
    status = read_status(run)
    return run if status is not None and status.live else None


def _nothing_found(run: Path | None) -> str:
    looked = f"status.json of a live run in {run}" if run else f"a live run under {RUNS}/"
    return f"looked for {looked} and found none: start one with composer-mesh train CONFIG"


def _print(about: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(about) + "\n")
        sys.stdout.flush()
    else:
        Console().print(render(about))


def _watch(run: Path, as_json: bool) -> None:
    if as_json:
        for about in _views(run):
            _print(about, as_json)
        return
    with Live(render(describe_run(run)), auto_refresh=False) as live:
        for about in _views(run):
            live.update(render(about), refresh=True)


def _views(run: Path) -> Iterator[dict[str, Any]]:
    """The run again and again, until it is over."""
    while (status := read_status(run)) is not None and status.live:
        yield describe_run(run)
        time.sleep(REFRESH_S)


def describe_run(run: Path) -> dict[str, Any]:
    """A run and its mesh as one plain object."""
    status = read_status(run)
    if status is None:
        raise FileNotFoundError(f"{run} holds no readable status.json: has the run been removed?")
    try:
        mesh = read_mesh(status.admin_url) if status.admin_url else None
    except AdminUnreachable:
        mesh = None
    return merge(run.name, status, mesh)


def merge(name: str, status: RunStatus, mesh: MeshTree | None) -> dict[str, Any]:
    """Join the status of a run with the live mesh; without a mesh the status alone is told."""
    about = {key: value for key, value in asdict(status).items() if key != "actors"}
    hosts = [_host(host, status) for host in mesh.hosts] if mesh else []
    listed = {a["name"] for host in hosts for proc in host["processes"] for a in proc["actors"]}
    missing = [_actor(actor, None, None) for actor in status.actors if actor.name not in listed]
    return {"run": name, **about, "mesh": mesh is not None, "hosts": hosts, "missing": missing}


def _host(host: HostNode, status: RunStatus) -> dict[str, Any]:
    known = {actor.name: actor for actor in status.actors}
    shown = [proc for proc in host.procs if _belongs(proc, known)]
    others = [proc for proc in host.procs if proc not in shown]
    return {
        "name": "localhost" if host.name.startswith("unix:") else host.name,
        "processes": [_process(proc, known, status) for proc in shown],
        "system": {
            "processes": len(others),
            "actors": sum(proc.system_actors + len(proc.actors) for proc in others)
            + sum(proc.system_actors for proc in shown),
        },
    }


def _belongs(proc: ProcNode, known: dict[str, ActorStatus]) -> bool:
    return proc.name == CONTROLLER_PROC or _owner(proc, known) is not None


def _owner(proc: ProcNode, known: dict[str, ActorStatus]) -> ActorStatus | None:
    """The actor that a process was started for: Monarch appends a rank to the name we gave it."""
    for actor in proc.actors:
        if actor.name in known:
            return known[actor.name]
    return known.get(proc.name.rpartition("-")[0]) or known.get(proc.name)


def _process(proc: ProcNode, known: dict[str, ActorStatus], status: RunStatus) -> dict[str, Any]:
    owner = _owner(proc, known)
    nodes = {node.name: node for node in proc.actors}
    actors = [_actor(owner, proc, nodes.get(owner.name))] if owner else []
    return {
        "name": owner.name if owner else "controller",
        "pid": owner.pid if owner else status.pid,
        "rss_bytes": proc.rss_bytes,
        "queue_depth": proc.queue_depth,
        "actors": actors,
    }


def _actor(status: ActorStatus, proc: ProcNode | None, node: Any) -> dict[str, Any]:
    return {
        **asdict(status),
        "state": _state(status, proc, node),
        "queue_depth": node.queue_depth if node else None,
        "messages_processed": node.messages_processed if node else None,
    }


def _state(status: ActorStatus, proc: ProcNode | None, node: Any) -> str:
    if proc is not None and not proc.reachable:
        return "dead"
    if node is not None and node.status.startswith("failed"):
        return "failed"
    return status.state


def render(about: dict[str, Any]) -> Tree:
    """The same object as a tree of lines."""
    tree = Tree(
        f"[bold]{escape(about['run'])}[/]  {escape(about['state'])}  step {about['step']}/"
        f"{about['steps']}  policy v{about['policy_version']}  transport {about['transport']}"
    )
    for host in about["hosts"]:
        branch = tree.add(f"host {escape(host['name'])}")
        for process in host["processes"]:
            _add_process(branch, process)
        system = host["system"]
        branch.add(f"[dim]Monarch itself: {system['actors']} actors[/]")
    if not about["mesh"]:
        tree.add("[yellow]the admin server does not answer: this is the run's own word[/]")
    for actor in about["missing"]:
        tree.add(_actor_line(actor))
    return tree


def _add_process(branch: Tree, process: dict[str, Any]) -> None:
    line = f"process {escape(process['name'])}  pid {process['pid']}"
    child = branch.add(f"{line}  {process['rss_bytes'] / MIB:.0f} MiB")
    for actor in process["actors"]:
        child.add(_actor_line(actor))


def _actor_line(actor: dict[str, Any]) -> str:
    parts = [f"[bold]{escape(actor['kind'])}[/] {escape(actor['name'])}", escape(actor["state"])]
    if actor["policy_version"] is not None:
        parts.append(f"policy v{actor['policy_version']}")
    if actor["activity"]:
        parts.append(escape(actor["activity"]))
    if actor["queue_depth"] is not None:
        parts.append(f"queue {actor['queue_depth']}  messages {actor['messages_processed']}")
    return "  ".join(parts)

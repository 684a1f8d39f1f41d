"""The supervision tree of a run, as the page shows it.

    controller            state, version, restarts, last event, time since
    └─ host
       └─ process mesh    the replicas of one kind, or the ranks of the trainer
          └─ actor

It is that of `composer-mesh tree`; of a run that has ended, the one that its controller saw last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_mesh.plugins.dashboard.catalog import RunSummary
from composer_mesh.plugins.dashboard.open_runs import OpenRun
from composer_mesh.plugins.dashboard.run_views import event_view
from composer_mesh.services.inspection.census import parse_name

LATELY = 8
DEAD_SHOWN_S = 10.0
"""Seconds for which a process that has died is shown, also when another one has its place."""
CONTROLLER = "controller"
LOCALHOST = "localhost"
GONE = ("dead", "failed")
UNKNOWN = "unknown"
"""State of an actor whose controller has ended without a last word."""


@dataclass(frozen=True)
class LastEvent:
    """The newest event about an actor; `time` is in seconds since 1970."""

    kind: str
    detail: str
    tone: str
    time: float | None


@dataclass(frozen=True)
class TreeNode:
    """One line of the tree, and what hangs on it; figures that are not known are None.

    `level` is controller, host, mesh or actor; a mesh that may be scaled has its `replicas`.
    """

    level: str
    name: str
    state: str
    doing: str = ""
    version: str = ""
    restarts: int = 0
    last: LastEvent | None = None
    memory: int | None = None
    cpu: float | None = None
    queue: int | None = None
    calls: int | None = None
    pid: int | None = None
    replicas: int | None = None
    children: Sequence[TreeNode] = ()


@dataclass(frozen=True)
class TreeLine:
    """A node as a row of the table; `guides` are the lines that are drawn before its name.

    `pool` is the name of the process mesh that is scaled in this row, empty for none.
    """

    node: TreeNode
    guides: Sequence[str] = ()
    pool: str = ""


def mesh(summary: RunSummary, run: OpenRun) -> dict[str, Any]:
    """Return the tree of a run, live or as it was last, and what happened to its actors lately."""
    about, changes = run.mesh(), run.changes_of_mesh()
    live = summary.live or summary.state == "silent"
    tree = None
    if about is not None:
        events = run.events()
        tree = tree_of(about, events, summary.state)
        tree = with_dead(tree, changes, time.time()) if live else tree
    return {
        "summary": summary,
        "about": about,
        "live": live,
        "rows": [] if tree is None else list(rows_of(tree)),
        "actors": [] if tree is None else [one for one in nodes_of(tree) if one.level == "actor"],
        "lately": [event_view(one) for one in changes[:LATELY]],
    }


def tree_of(
    about: Mapping[str, Any], events: Sequence[Mapping[str, Any]], state: str
) -> TreeNode | None:
    """Return the tree of an object of `tree --json`, with the newest event of each node.

    `events` are the newest first; `state` is that of the run. None without any process.
    """
    hosts: dict[str, list[TreeNode]] = {}
    controller = TreeNode("controller", CONTROLLER, state, restarts=about["restarts"])
    last = _last_events(events)
    for host, process in _processes(about):
        if not process["actors"]:
            controller = replace(controller, **_figures(process))
            hosts.setdefault(host, [])
            continue
        node = _actor(process, last)
        hosts.setdefault(host, []).append(replace(node, state=UNKNOWN) if state == "died" else node)
    if not any(hosts.values()):
        return None
    return replace(
        controller,
        version=f"v{about['policy_version']}",
        last=last.get(""),
        children=[_host(name, actors, last) for name, actors in hosts.items() if actors],
    )


def _processes(about: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the host's name of each process and the process, also of those that do not answer."""
    for host in about["hosts"]:
        for process in host["processes"]:
            yield host["name"], process
    for process in about["missing"]:
        actors = process["actors"]
        yield (actors[0].get("host") if actors else None) or LOCALHOST, process


def _actor(process: Mapping[str, Any], last: Mapping[str, LastEvent]) -> TreeNode:
    actor, name = process["actors"][0], process["name"]
    version = actor.get("policy_version")
    return TreeNode(
        "actor",
        name,
        process["state"],
        actor.get("activity") or "",
        "" if version is None else f"v{version}",
        process["restarts"],
        last.get(_place(name)),
        **_figures(process),
        calls=actor.get("outstanding"),
    )


def _figures(process: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "memory": process["rss_bytes"],
        "cpu": process["cpu_percent"],
        "queue": process["queue_depth"],
        "pid": process["pid"],
    }


def _host(name: str, actors: Sequence[TreeNode], last: Mapping[str, LastEvent]) -> TreeNode:
    meshes: dict[str, list[TreeNode]] = {}
    for actor in actors:
        meshes.setdefault(parse_name(actor.name).mesh, []).append(actor)
    children = [_mesh(mesh, meshes[mesh]) for mesh in sorted(meshes)]
    return replace(_sum("host", name, actors), last=last.get(name), version="", children=children)


def _mesh(name: str, actors: Sequence[TreeNode]) -> TreeNode:
    """Return the node of a mesh: a pool of numbered replicas may be scaled."""
    numbered = any(one.name.startswith(f"{name}-") for one in actors)
    placed = sorted(actors, key=lambda one: (parse_name(one.name).rank, one.name))
    return replace(
        _sum("mesh", name, placed), replicas=len(placed) if numbered else None, children=placed
    )


def _sum(level: str, name: str, actors: Sequence[TreeNode]) -> TreeNode:
    """Return a node that has the states and the totals of some actors, and their newest event."""
    states = [one.state for one in actors]
    counted = ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states))
    worst = next((one for one in GONE if one in states), states[0])
    versions = sorted({int(one.version[1:]) for one in actors if one.version})
    known = [one.last for one in actors if one.last is not None]
    return TreeNode(
        level,
        name,
        worst,
        counted,
        "–".join(f"v{one}" for one in dict.fromkeys([versions[0], versions[-1]]))
        if versions
        else "",
        sum(one.restarts for one in actors),
        max(known, key=lambda one: one.time or 0.0, default=None),
        _total(one.memory for one in actors),
        _total(one.cpu for one in actors),
        _total(one.queue for one in actors),
        _total(one.calls for one in actors),
    )


def _total(values: Iterator[Any]) -> Any:
    known = [one for one in values if one is not None]
    return sum(known) if known else None


def _last_events(events: Sequence[Mapping[str, Any]]) -> dict[str, LastEvent]:
    """Return the newest event of each place of an actor, of each host, and of the run itself."""
    found: dict[str, LastEvent] = {}
    for event in events:
        place = _place(str(event.get("actor") or ""))
        if place not in found:
            seen = event_view(event)
            when = seen["time"] if isinstance(seen["time"], int | float) else None
            found[place] = LastEvent(seen["kind"], str(seen["detail"]), seen["tone"], when)
    return found


def _place(actor: str) -> str:
    """Return the name of an actor's place, which all of its processes share."""
    name, dot, generation = actor.rpartition(".")
    return name if dot and generation.isdecimal() else actor


def with_dead(
    tree: TreeNode | None, events: Sequence[Mapping[str, Any]], now: float
) -> TreeNode | None:
    """Return the tree with the processes that died lately as dead ones, replaced or not."""
    if tree is None:
        return None
    died = {
        str(one.get("actor")): one
        for one in events
        if one.get("event") == "actor_died" and now - _time(one) < DEAD_SHOWN_S
    }
    for name, event in died.items():
        fields = event.get("fields")
        of = fields.get("host") if isinstance(fields, dict) else None
        host = next((one for one in tree.children if one.name == of), tree.children[0])
        tree = _replaced(tree, host, _with_one_dead(host, name, event))
    return tree


def _with_one_dead(host: TreeNode, name: str, event: Mapping[str, Any]) -> TreeNode:
    actors = [actor for one in host.children for actor in one.children]
    last = event_view(event)
    gone = TreeNode(
        *("actor", name, "dead"), last=LastEvent(last["kind"], last["detail"], "bad", _time(event))
    )
    kept = [
        replace(one, state="dead", last=one.last or gone.last) if one.name == name else one
        for one in actors
    ]
    found = kept if any(one.name == name for one in actors) else [*kept, gone]
    return _host(host.name, found, {} if host.last is None else {host.name: host.last})


def _replaced(tree: TreeNode, old: TreeNode, new: TreeNode) -> TreeNode:
    return replace(tree, children=[new if one is old else one for one in tree.children])


def _time(event: Mapping[str, Any]) -> float:
    found = event.get("time")
    return float(found) if isinstance(found, int | float) else 0.0


def nodes_of(tree: TreeNode) -> Iterator[TreeNode]:
    """Yield a node and all that hangs on it, from above."""
    yield tree
    for child in tree.children:
        yield from nodes_of(child)


def rows_of(node: TreeNode, guides: tuple[str, ...] = ()) -> Iterator[TreeLine]:
    """Yield the rows of a tree, from above, each with the lines that lead to it.

    A process mesh with a single actor is one row, that of the actor.
    """
    pool = node.name if node.replicas is not None else ""
    if node.level == "mesh" and len(node.children) == 1:
        yield TreeLine(node.children[0], guides, pool)
        return
    yield TreeLine(node, guides, pool)
    above = tuple({"tee": "line", "elbow": "blank"}.get(one, one) for one in guides)
    for child in node.children:
        yield from rows_of(child, (*above, "elbow" if child is node.children[-1] else "tee"))

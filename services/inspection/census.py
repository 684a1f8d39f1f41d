"""Merges all actors of a run into one list: those that answered, and those that cannot.

Actors that answer report their status; pools know replicas that are dead, starting or leaving.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from composer_mesh.services.directory.status import ActorStatus
from composer_mesh.services.inspection.actor_names import parse_name


class Pool(Protocol):
    """Several replicas of one kind; each line of `status` is about one."""

    def status(self) -> list[dict[str, Any]]: ...


def census(
    actors: Sequence[ActorStatus],
    pools: Mapping[str, Pool],
    before: Sequence[ActorStatus] = (),
) -> tuple[ActorStatus, ...]:
    """Return the actors that answered and those that could not, grouped by kind.

    Pools report missing replicas. For other kinds, an actor listed in `before` without a successor
    is reported as dead.
    """
    lines = [(kind, line) for kind, pool in pools.items() for line in pool.status()]
    of_pools = {line["name"]: line for _, line in lines}
    known = [_joined(actor, of_pools.get(actor.name)) for actor in actors]
    names = {actor.name for actor in known}
    unheard = [_unheard(kind, line) for kind, line in lines if line["name"] not in names]
    return tuple(_by_kind([*known, *unheard, *_gone(known, pools, before)]))


def _gone(
    known: Sequence[ActorStatus], pools: Mapping[str, Pool], before: Sequence[ActorStatus]
) -> list[ActorStatus]:
    places = {_place(actor)[:2] for actor in known}
    return [
        replace(actor, state="dead", pid=None, policy_version=None, activity="")
        for actor in before
        if actor.kind not in pools and _place(actor)[:2] not in places
    ]


def _joined(actor: ActorStatus, line: Mapping[str, Any] | None) -> ActorStatus:
    if line is None:
        return replace(actor, restarts=parse_name(actor.name).generation - 1)
    return replace(
        actor,
        state=actor.state if line["state"] == "ready" else line["state"],
        activity=line["reason"] or actor.activity,
        restarts=line["generation"] - 1,
        outstanding=line["outstanding"],
        host=line.get("host") or actor.host,
    )


def _unheard(kind: str, line: Mapping[str, Any]) -> ActorStatus:
    return ActorStatus(
        line["name"],
        kind,
        line["pid"],
        line["state"],
        activity=line["reason"],
        restarts=line["generation"] - 1,
        outstanding=line["outstanding"],
        host=line.get("host"),
    )


def _by_kind(actors: Sequence[ActorStatus]) -> list[ActorStatus]:
    kinds = list(dict.fromkeys(actor.kind for actor in actors))
    return [actor for kind in kinds for actor in sorted(actors, key=_place) if actor.kind == kind]


def _place(actor: ActorStatus) -> tuple[str, int, int]:
    name = parse_name(actor.name)
    return name.mesh, name.rank, name.generation

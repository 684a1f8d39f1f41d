"""Merges all actors of a run into one list: those that answered, and those that cannot.

Actors that answer report their status; pools know replicas that are dead, starting or leaving.
Pure.

Parses actor names into mesh, rank and generation, and formats failures on one line.

generator-1.3   the third process of rank 1 of the mesh "generator"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, MeshError, RemoteError
from composer_mesh.services.directory.status import ActorStatus


@dataclass(frozen=True)
class ActorName:
    """A mesh, a rank in it, and how many processes that rank has had."""

    mesh: str
    rank: int = 0
    generation: int = 1


def parse_name(name: str) -> ActorName:
    """Split a name into its parts; an actor alone in its mesh has its name as mesh and rank 0."""
    place, dot, generation = name.rpartition(".")
    if not dot or not generation.isdecimal():
        place, generation = name, "1"
    mesh, dash, rank = place.rpartition("-")
    if not dash or not rank.isdecimal():
        return ActorName(place, 0, int(generation))
    return ActorName(mesh, int(rank), int(generation))


def placed(actor: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event's fields, adding the actor's mesh and rank where the host is known."""
    if not actor or "host" not in fields:
        return dict(fields)
    name = parse_name(actor)
    return {"host": fields["host"], "mesh": name.mesh, "rank": name.rank, **fields}


def failure_line(error: MeshError, host: str) -> str:
    """Return a failure with its actor's host, mesh and rank; other errors as their text."""
    if not isinstance(error, ActorDied | DeadlineExceeded | RemoteError):
        return str(error)
    name = parse_name(error.actor)
    where = f"host {host}, mesh {name.mesh}, rank {name.rank}"
    first, newline, rest = str(error).partition("\n")
    return f"{first} ({where}){newline}{rest}"


class CensusPool(Protocol):
    """Several replicas of one kind; each line of `status` is about one."""

    def status(self) -> list[dict[str, Any]]: ...


def census(
    actors: Sequence[ActorStatus],
    pools: Mapping[str, CensusPool],
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
    unanswered = [_unanswered(kind, line) for kind, line in lines if line["name"] not in names]
    return tuple(_by_kind([*known, *unanswered, *_gone(known, pools, before)]))


def _gone(
    known: Sequence[ActorStatus], pools: Mapping[str, CensusPool], before: Sequence[ActorStatus]
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


def _unanswered(kind: str, line: Mapping[str, Any]) -> ActorStatus:
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

"""Parses actor names into mesh, rank and generation, and formats failures on one line.

generator-1.3   the third process of rank 1 of the mesh "generator"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, MeshError, RemoteError


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

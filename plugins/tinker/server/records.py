"""What a server remembers of clients: sessions, models, saved weights and samplers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.services.web.errors import bad

SavedKind = Literal["training", "sampler"]
SEGMENTS: dict[SavedKind, str] = {"training": "weights", "sampler": "sampler_weights"}
"""Part of a path that says what was saved."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCHEME = "tinker://"


@dataclass(frozen=True)
class Session:
    """One program of a client; `client` is who brought its key."""

    id: str
    client: str
    created: float
    used: float


@dataclass(frozen=True)
class Model:
    """A model, and the file with its state at `saved_position`; without one, it is as created."""

    id: str
    number: int
    session: str
    client: str
    spec: ModelSpec
    metadata: str
    created: float
    used: float
    position: int = 0
    saved_position: int = 0
    saved_steps: int = 0
    steps: int = 0
    file: str = ""
    unloaded: bool = False

    def moved(self, position: int, steps: int, used: float) -> Model:
        """Return the model after changes."""
        return replace(self, position=position, steps=steps, used=used)


@dataclass(frozen=True)
class Saved:
    """Weights that a client saved, by their path."""

    path: str
    client: str
    model: str
    kind: SavedKind
    file: str
    bytes: int
    created: float
    metadata: str
    spec: ModelSpec
    expires: float | None = None

    @property
    def checkpoint_id(self) -> str:
        """The path without the model, as lists of checkpoints show it."""
        return self.path.removeprefix(f"{SCHEME}{self.model}/")


@dataclass(frozen=True)
class Sampler:
    """What samples are drawn from: a file of weights, or the base model where it is empty.

    An `inflight` one follows what its model publishes later.
    """

    id: str
    session: str
    client: str
    path: str
    file: str
    model: str
    inflight: bool = False


def saved_path(model: str, kind: SavedKind, name: str) -> str:
    """Return the path of weights; raises `Refused` for a name that cannot be part of one."""
    if not NAME.fullmatch(name):
        raise bad(
            f"the name of saved weights is {name[:140]!r}: use 1 to 128 letters, digits, '.', '_' "
            "and '-', beginning with a letter or digit"
        )
    return f"{SCHEME}{model}/{SEGMENTS[kind]}/{name}"

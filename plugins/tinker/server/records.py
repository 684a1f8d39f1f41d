"""What a server remembers of clients: sessions, models, saved weights, samplers and operations.

An operation is what a client requests, its place among those of its model, and its answer.

`Executing` notes in a file which are being executed, for the next start of a server that was killed
by one of them. A place of the file is one number of 8 bytes, 0 where it is free. It is written
before its operation begins, by one call that a killed process has made or not; it need not outlive
the machine, so that nothing waits for the disk.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.plugins.tinker.server.results import Result
from composer_mesh.services.web.errors import bad

SavedKind = Literal["training", "sampler"]
SEGMENTS: dict[SavedKind, str] = {"training": "weights", "sampler": "sampler_weights"}
"""Part of a path that says what was saved."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCHEME = "tinker://"


@dataclass(frozen=True)
class ClientSession:
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
    def id(self) -> str:
        """The path, by which the weights are known."""
        return self.path

    @property
    def checkpoint_id(self) -> str:
        """The path without the model, as lists of checkpoints show it."""
        return self.path.removeprefix(f"{SCHEME}{self.model}/")


@dataclass(frozen=True)
class SamplerSource:
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


Record = ClientSession | Model | Saved | SamplerSource


def saved_path(model: str, kind: SavedKind, name: str) -> str:
    """Return the path of weights; raises `Refused` for a name that cannot be part of one."""
    if not NAME.fullmatch(name):
        raise bad(
            f"the name of saved weights is {name[:140]!r}: use 1 to 128 letters, digits, '.', '_' "
            "and '-', beginning with a letter or digit"
        )
    return f"{SCHEME}{model}/{SEGMENTS[kind]}/{name}"


Kind = Literal[
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "unload_model",
    "sample",
]


@dataclass(frozen=True)
class OperationRequest:
    """What is written to the log before a client learns of its operation.

    `scope` and `seq` name it: the same two with the same body are the same operation, however often
    they are sent. `body` is all that is needed to execute it, now or again. `identity` is compared
    in its place, where a client that repeats a request changes some of it.
    """

    client: str
    kind: Kind
    scope: str
    seq: int | None
    body: bytes
    model: str = ""
    cost: int = 1
    identity: bytes | None = None


@dataclass(eq=False)
class Operation:
    """An accepted operation that is not answered yet; its body is in the log."""

    number: int
    request_id: str
    request: OperationRequest
    size: int
    """Bytes of its body."""
    payload: Any = None
    """Its decoded body; of a large one that waits, None."""
    held: int = 0
    """Bytes of its body that are in memory while it waits."""
    waited_since: float = 0.0
    attempts: int = 0
    """How often the process that executed it, or the server, was lost; as in the log."""
    result: Result | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> str:
        """The model that it is of; empty for samples."""
        return self.request.model

    def answer(self, result: Result) -> None:
        """Give its answer to all who wait for it."""
        self.result = result
        self.done.set()


@dataclass(frozen=True)
class Accepted:
    """The answer to a request for an operation."""

    request_id: str
    number: int
    is_new: bool

    def body(self, model: str = "", **more: Any) -> Mapping[str, Any]:
        """Return it as clients read it."""
        return {"request_id": self.request_id, **({"model_id": model} if model else {}), **more}


WIDTH = 8
MOST_ATTEMPTS = 4
"""Attempts of an operation in which its process, or the server, may be lost before it fails."""


class Executing:
    """The numbers of the operations under way; those that an earlier process left are in `left`."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        found = os.pread(self._file, os.fstat(self._file).st_size, 0)
        numbers = (found[at : at + WIDTH] for at in range(0, len(found), WIDTH))
        self.left = sorted({int.from_bytes(one, "little") for one in numbers} - {0})
        self._free, self._places = list[int](), 0

    def clear(self) -> None:
        """Forget what was left, once the log has it."""
        os.ftruncate(self._file, 0)
        self.left = []

    @contextmanager
    def during(self, operations: Iterable[Operation]) -> Iterator[None]:
        """Note operations for as long as they are executed; a killed process leaves them noted."""
        places = [self._note(one.number) for one in operations]
        try:
            yield
        finally:
            for place in places:
                self._write(place, 0)
            self._free += places

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _note(self, number: int) -> int:
        if not self._free:
            self._free.append(self._places)
            self._places += 1
        place = self._free.pop()
        self._write(place, number)
        return place

    def _write(self, place: int, number: int) -> None:
        os.pwrite(self._file, number.to_bytes(WIDTH, "little"), place * WIDTH)

"""An operation of a client: what it asks, its place among those of its model, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_mesh.plugins.tinker.server.results import Result

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

"""Exposes an actor's endpoints as methods of its proxy: a service or a session."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty

from composer_mesh.mesh.actor import MeshActor


class Endpoints(ABC):
    """Makes `proxy.endpoint(...)` equal to `proxy.call("endpoint", ...)` for each actor endpoint.

    Use `call` for an endpoint whose name is also an attribute of the proxy.
    """

    def __init__(self, actor_class: type[MeshActor]) -> None:
        self.endpoints = endpoints_of(actor_class)
        self._class_name = actor_class.__name__

    def __getattr__(self, endpoint: str) -> Callable[..., Awaitable[Any]]:
        if endpoint.startswith("_") or endpoint == "endpoints":
            raise AttributeError(
                endpoint
            )  # not set yet while unpickling or copying: avoids recursion
        self.check(endpoint)
        return partial(self.call, endpoint)

    def check(self, endpoint: str) -> None:
        """Raise AttributeError if the actor has no such endpoint."""
        if endpoint not in self.endpoints:
            raise AttributeError(
                f"{self._class_name} has no endpoint {endpoint!r}: "
                f"it has {', '.join(sorted(self.endpoints))}"
            )

    @abstractmethod
    async def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint by name."""


def endpoints_of(actor_class: type[MeshActor]) -> frozenset[str]:
    """Return the names of an actor class's endpoints."""
    names = (name for name in dir(actor_class) if not name.startswith("__"))
    return frozenset(
        name for name in names if isinstance(getattr(actor_class, name), EndpointProperty)
    )


def default_name(actor_class: type[MeshActor]) -> str:
    """Derive a service's name from its class: `TeacherReplayActor` gives `teacher-replay`."""
    stem = actor_class.__name__.removesuffix("Actor") or actor_class.__name__
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", stem).lower()

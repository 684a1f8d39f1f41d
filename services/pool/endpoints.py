"""An actor's endpoints as attributes of what stands before the actor: a service, a session."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty

from composer_mesh.mesh.actor import MeshActor


class Endpoints(ABC):
    """`thing.endpoint(...)` is `thing.call("endpoint", ...)` for each endpoint of an actor class.

    An endpoint that is called as one of the thing's own attributes is reached by `call`.
    """

    def __init__(self, actor_class: type[MeshActor]) -> None:
        self.endpoints = endpoints_of(actor_class)
        self._class_name = actor_class.__name__

    def __getattr__(self, endpoint: str) -> Callable[..., Awaitable[Any]]:
        if endpoint.startswith("_") or endpoint == "endpoints":
            raise AttributeError(endpoint)  # not yet set while unpickling or copying: no recursion
        self.check(endpoint)
        return partial(self.call, endpoint)

    def check(self, endpoint: str) -> None:
        """Raise where the actor has no such endpoint."""
        if endpoint not in self.endpoints:
            raise AttributeError(
                f"{self._class_name} has no endpoint {endpoint!r}: "
                f"it has {', '.join(sorted(self.endpoints))}"
            )

    @abstractmethod
    async def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint by its name."""


def endpoints_of(actor_class: type[MeshActor]) -> frozenset[str]:
    """The names of the endpoints of an actor class."""
    names = (name for name in dir(actor_class) if not name.startswith("__"))
    return frozenset(
        name for name in names if isinstance(getattr(actor_class, name), EndpointProperty)
    )


def default_name(actor_class: type[MeshActor]) -> str:
    """A service's name from its class: `TeacherReplayActor` gives `teacher-replay`."""
    stem = actor_class.__name__.removesuffix("Actor") or actor_class.__name__
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "-", stem).lower()

"""The actors that a rollout worker calls, as the controller names them whenever they change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.mesh.call_stream import Calls
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import BackgroundTasks, told_to_loop


@dataclass(frozen=True)
class Peer:
    """One actor that serves; while it is not `open` it takes nothing new."""

    name: str
    ref: Any = field(repr=False)
    open: bool = True


@dataclass(frozen=True)
class Neighbours:
    """All actors that a rollout worker may call, and why others are gone, by their names."""

    generators: tuple[Peer, ...]
    environments: tuple[Peer, ...]
    gone: Mapping[str, str]


OpenStream = Callable[[str, Any], Calls]
"""Opens the calls to an actor, given its name and reference."""


class Peers:
    """The call streams to the actors of one kind."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream
        self._calls: dict[str, Calls] = {}
        self._gone: dict[str, str] = {}
        self._closing = BackgroundTasks(told_to_loop)
        self._changed = asyncio.Event()
        self.open: list[str] = []
        """Names of those that take new work."""

    def update(self, peers: tuple[Peer, ...], gone: Mapping[str, str]) -> None:
        """Connect to new ones; end the calls to those that are gone."""
        for peer in peers:
            if peer.name not in self._calls:
                self._calls[peer.name] = self._open_stream(peer.name, peer.ref)
        for name in self._calls.keys() - {peer.name for peer in peers}:
            reason = self._gone[name] = gone.get(name, "it was stopped")
            calls = self._calls.pop(name)
            calls.lose(ActorDied(name, reason))
            self._closing.start(f"closing the calls to {name}", calls.close())
        self.open = [peer.name for peer in peers if peer.open]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def load(self, name: str) -> int:
        """Return the calls that an actor has not answered, as far as it is known here."""
        return self._calls[name].load

    def died(self, name: str) -> ActorDied:
        """Return the reason why an actor is gone."""
        return ActorDied(name, self._gone.get(name, "it was stopped"))

    async def call(self, name: str, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint of one actor. Waits for its answer; raises `ActorDied`."""
        if name not in self._calls:
            raise self.died(name)
        return await self._calls[name].call(endpoint, *args)

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    async def some_open(self) -> list[str]:
        """Return the names of those that take new work. Waits until there is one."""
        while not self.open:
            await self._changed.wait()
        return self.open

    async def close(self) -> None:
        """Disconnect from all."""
        await asyncio.gather(*(calls.close() for calls in self._calls.values()))
        await self._closing.wait()

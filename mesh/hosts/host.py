"""The port to a host: starting, watching and ending processes there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh

from composer_mesh.mesh.supervision import HostLost
from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")


class Host(Protocol):
    """A host on which processes can be started, watched and ended."""

    name: str
    lost: asyncio.Future[str] | None
    """Completed with the reason once the host is unreachable; None for the controller's machine."""

    @property
    def mesh(self) -> HostMesh:
        """Monarch's host mesh of this host."""
        ...

    async def command(
        self, name: str, token: str, env: Mapping[str, str], preload: Sequence[str]
    ) -> BootstrapCommand:
        """Return the bootstrap command of a process called `name`, of a run with this token.

        With `preload` it is forked from a server that has imported these modules.
        """
        ...

    async def ended(self, pid: int) -> str:
        """Wait until a process has ended; return how."""
        ...

    async def wait_gone(self, pid: int, deadline_s: float) -> bool:
        """Wait until a process is gone; return False if it is not at the deadline."""
        ...

    async def kill(self, pids: Sequence[int]) -> None:
        """Kill processes that no longer respond, and the process groups that they lead."""
        ...

    async def started_processes(self, *marks: str) -> list[int]:
        """Return processes that were started there with these command-line arguments."""
        ...


def is_lost(host: Host) -> bool:
    """Whether the host is unreachable."""
    return host.lost is not None and host.lost.done()


async def unless_lost(starting: Coroutine[Any, Any, T], host: Host) -> T:
    """Await the start of something on a host; raises `HostLost` if the host is lost meanwhile."""
    task = asyncio.ensure_future(starting)
    either: list[asyncio.Future[Any]] = [task] if host.lost is None else [task, host.lost]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and host.lost is not None:
            raise HostLost(host.name, host.lost.result())
        return task.result()
    finally:
        await cancel_and_wait([task])

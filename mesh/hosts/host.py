"""What a host can do for whoever owns processes there, and what is done only while it is there."""

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
    """Where processes can be: how they are started, watched and ended there."""

    name: str
    lost: asyncio.Future[str] | None
    """Done, with the reason, once nothing there can be reached any more; None where that is us."""

    @property
    def mesh(self) -> HostMesh:
        """Monarch's view of it."""
        ...

    def command(self, name: str, token: str, env: Mapping[str, str]) -> BootstrapCommand:
        """The program of a process called `name`, of a run with this token."""
        ...

    async def ended(self, pid: int) -> str:
        """Wait until a process has ended; says how."""
        ...

    async def wait_gone(self, pid: int, deadline_s: float) -> bool:
        """Wait until a process is gone; False where it still is at the deadline."""
        ...

    async def kill(self, pids: Sequence[int]) -> None:
        """End processes that are beyond asking, and the groups that they lead."""
        ...

    async def born(self, *marks: str) -> list[int]:
        """Processes that were started there with these words as arguments."""
        ...


def is_lost(host: Host) -> bool:
    """Whether nothing there can be reached any more."""
    return host.lost is not None and host.lost.done()


async def unless_lost(starting: Coroutine[Any, Any, T], host: Host) -> T:
    """What is started on a host; raises `HostLost` where that goes meanwhile."""
    task = asyncio.ensure_future(starting)
    either: list[asyncio.Future[Any]] = [task] if host.lost is None else [task, host.lost]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and host.lost is not None:
            raise HostLost(host.name, host.lost.result())
        return task.result()
    finally:
        await cancel_and_wait([task])

"""The port to a host: starting, watching and ending processes there.

The controller's machine as a host: its processes are children of this one.

Shuts Monarch's client down at the exit of a process, and waits until it has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import math
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, context, shutdown_context, this_host

from composer_mesh.mesh import processes
from composer_mesh.mesh.environment import python_module, without_noise
from composer_mesh.mesh.fork_server.owner import ForkServers
from composer_mesh.mesh.hosts.exit_status import how_it_ended
from composer_mesh.mesh.machine import NAME
from composer_mesh.mesh.monarch_log import open_log
from composer_mesh.mesh.supervision import HostLost
from composer_mesh.mesh.waiting import unless

FLUSH_S = 0.3
"""Longest wait for each last flush, which is never confirmed by a host that is gone; Monarch's."""
EXIT_S = 10.0


@functools.cache
def end_client_at_exit() -> None:
    """End Monarch's client before this process exits. Called once the client may start.

    Monarch's own handler gives up after a second, less than the flushes may take on a busy machine;
    its threads then need an interpreter that is gone, and abort the process.
    """
    context()  # which registers that handler: ours, registered later, runs before it
    atexit.register(_end_client, os.getpid())


def _end_client(pid: int) -> None:
    if pid == os.getpid():  # a forked process has none of Monarch's threads
        shutdown_context(host_timeout=FLUSH_S).get(timeout=EXIT_S)


class LocalHost:
    """The controller's own machine."""

    def __init__(self, name: str = NAME) -> None:
        self.name = name
        self._fork_servers = ForkServers()
        self.lost: asyncio.Future[str] | None = None
        self._mesh: HostMesh | None = None

    @property
    def mesh(self) -> HostMesh:
        """Monarch's host mesh; the first use starts Monarch in this process."""
        if self._mesh is None:
            open_log("controller")  # where no command has done it
            with without_noise():
                self._mesh = this_host()
            end_client_at_exit()
        return self._mesh

    async def command(
        self, name: str, token: str, env: Mapping[str, str], preload: Sequence[str]
    ) -> BootstrapCommand:
        python, *arguments = python_module(processes.BOOTSTRAP, name, token, str(os.getpid()))
        forked = await self._fork_servers.environment(env, preload)
        return BootstrapCommand(python, None, arguments, {**env, **forked})

    async def ended(self, pid: int) -> str:
        """Wait for the exit with the kernel, which reports it before Monarch unless that reaped it.

        Monarch reports it only at its next poll, which may take half a minute.
        """
        reason = await processes.end_of_child(pid)
        if reason is None:  # the child of a fork server, or collected by Monarch
            await processes.wait_gone(pid, math.inf)
            reason = await how_it_ended(pid, self._fork_servers.statuses)
        return reason or f"its process {pid} has ended"

    async def wait_gone(self, pid: int, deadline_s: float) -> bool:
        return await processes.wait_gone(pid, deadline_s)

    async def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            processes.kill_group(pid)

    def close(self) -> None:
        """End the fork servers."""
        self._fork_servers.close()

    async def started_processes(self, *marks: str) -> list[int]:
        return processes.children_of(os.getpid(), marks)


T = TypeVar("T")


class Host(Protocol):
    """A host on which processes can be started, watched and ended."""

    name: str
    lost: asyncio.Future[str] | None
    """Completed with the reason once the host is unreachable; None for the controller's machine."""

    @property
    def mesh(self) -> HostMesh:
        """Monarch's host mesh of this host."""

    async def command(
        self, name: str, token: str, env: Mapping[str, str], preload: Sequence[str]
    ) -> BootstrapCommand:
        """Return the bootstrap command of a process called `name`, of a run with this token.

        With `preload` it is forked from a server that has imported these modules.
        """

    async def ended(self, pid: int) -> str:
        """Wait until a process has ended; return how."""

    async def wait_gone(self, pid: int, deadline_s: float) -> bool:
        """Wait until a process is gone; return False if it is not at the deadline."""

    async def kill(self, pids: Sequence[int]) -> None:
        """Kill processes that no longer respond, and the process groups that they lead."""

    async def started_processes(self, *marks: str) -> list[int]:
        """Return processes that were started there with these command-line arguments."""


def is_lost(host: Host) -> bool:
    """Whether the host is unreachable."""
    return host.lost is not None and host.lost.done()


async def unless_lost(starting: Coroutine[Any, Any, T], host: Host) -> T:
    """Await the start of something on a host; raises `HostLost` if the host is lost meanwhile."""
    lost = [] if host.lost is None else [host.lost]
    return await unless(starting, lost, lambda: HostLost(host.name, lost[0].result()))

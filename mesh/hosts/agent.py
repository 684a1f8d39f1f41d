"""The actor that speaks for a host: hears its controller, looks after processes, tells what it has.

One on each host of a run that is not the controller's own. It can do what only a process of that
machine can: wait for an end, kill a group, read `/proc`. It decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh import processes
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.hosts.exit_status import ExitStatuses
from composer_mesh.mesh.hosts.lease import Beats, Lease
from composer_mesh.mesh.hosts.serve import FOLDER
from composer_mesh.mesh.hosts.versions import versions
from composer_mesh.mesh.machine import this_machine
from composer_mesh.planning.host_capacity import HostResources

LONGEST_LINE = 200
TELL_S = 1.0
"""How long the parent of a process may take to note how that ended."""


@dataclass(frozen=True)
class HostAbout:
    """What a host says of itself; `server` is the process that starts the others there."""

    machine: HostResources
    hostname: str
    python: str
    server: int
    versions: dict[str, str]


class HostAgent(MeshActor):
    """The agent of the worker that has started this process."""

    kind = "host_agent"

    def __init__(self) -> None:
        folder = Path(os.environ[FOLDER])
        self._lease, self._exit_statuses = Lease(folder), ExitStatuses(folder)
        self._beats = Beats(self._lease)

    @concurrent_endpoint
    async def beat(self, number: int, heard: int) -> None:
        """The controller is there, and has heard the answer to beat `heard`: the lease goes on.

        Raises where this host's server stands still, because it can then start and end nothing.
        """
        if processes.stands_still(os.getppid()):
            raise RuntimeError(f"process {os.getppid()}, which serves this host, is stopped")
        self._beats.came(number, heard)

    @concurrent_endpoint
    async def give_back(self) -> None:
        """The run is over: the worker ends everything here, this process too."""
        self._lease.end()

    @concurrent_endpoint
    async def about(self) -> HostAbout:
        """What this host has."""
        machine = await asyncio.to_thread(this_machine)
        found = await asyncio.to_thread(versions)
        return HostAbout(machine, socket.gethostname(), sys.executable, os.getppid(), found)

    @concurrent_endpoint
    async def ended(self, pid: int, wait_s: float) -> str | None:
        """How a process of this host has ended. Waits at most `wait_s`; None while it runs."""
        if not await processes.wait_gone(pid, wait_s):
            return None
        for _ in range(10):
            if (words := self._exit_statuses.of(pid)) is not None:
                return words
            await asyncio.sleep(TELL_S / 10)
        return f"its process {pid} has ended"

    @concurrent_endpoint
    async def kill(self, pids: Sequence[int]) -> None:
        """End processes of this host that did not when asked, and the groups that they lead."""
        for pid in pids:
            processes.kill_group(pid)

    @concurrent_endpoint
    async def born(self, marks: Sequence[str]) -> list[int]:
        """Living processes that this worker has started with all these words as arguments."""
        return processes.children_of(os.getppid(), marks)

    @concurrent_endpoint
    async def sees(self, path: Path) -> str | None:
        """What a file holds, at most a line of it; None where this host has no such file."""
        return await asyncio.to_thread(_first_line, path)

    @concurrent_endpoint
    async def has_folder(self, path: Path) -> bool:
        """Whether this host has such a folder."""
        return await asyncio.to_thread(path.is_dir)


def _first_line(path: Path) -> str | None:
    try:
        with path.open() as file:
            return file.readline(LONGEST_LINE)
    except OSError:
        return None

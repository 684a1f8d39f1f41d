"""The actor on a remote host that answers the controller's beats and manages its processes.

There is one on each host except the controller's. It does what needs a process on that machine:
waits for process exits, kills process groups, reads `/proc`. The controller makes all decisions.

Installed versions that must be the same on all hosts, and how hosts differ.

Messages between processes are pickles of this package's classes, so a host with another Python,
torch, Monarch or composer-mesh would fail later, or silently compute something else.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from monarch.actor import concurrent_endpoint

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId
from composer_mesh.configs.installed import installed_version
from composer_mesh.mesh import processes
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.fork_server.owner import ForkServers
from composer_mesh.mesh.hosts.exit_status import ExitStatuses, how_it_ended
from composer_mesh.mesh.hosts.roster import Lease, LeaseRenewal
from composer_mesh.mesh.hosts.serve import FOLDER
from composer_mesh.mesh.machine import this_machine
from composer_mesh.mesh.monarch_log import open_log
from composer_mesh.mesh.pyspy import StackDump, dump_stacks
from composer_mesh.planning import hub
from composer_mesh.planning.host_capacity import HostResources

PACKAGES = ("torch", "torchmonarch", "composer-mesh")
SOURCES = "composer-mesh sources"


@cache
def versions() -> dict[str, str]:
    """Return name and version of each; this package's sources by their digest."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"Python": python} | {
        name: installed_version(name) or "(not installed)" for name in PACKAGES
    }
    return found | {SOURCES: _digest()}


def differences(host: str, here: dict[str, str], there: dict[str, str]) -> list[str]:
    """Describe each difference, as `gpu-1 has torch 2.12.0, the controller 2.13.0`."""
    return [
        f"{host} has {name} {there.get(name, 'of no version')}, the controller {mine}"
        for name, mine in here.items()
        if there.get(name) != mine
    ]


def _digest() -> str:
    package, found = Path(__file__).parents[2], hashlib.sha256()
    for folder in sorted(path for path in package.iterdir() if path.is_dir()):
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(package)}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()[:12]


LONGEST_LINE = 200


@dataclass(frozen=True)
class HostDescription:
    """Description of a host; `server` is the process that starts the others there."""

    machine: HostResources
    hostname: str
    python: str
    server: int
    versions: dict[str, str]


class HostAgent(MeshActor):
    """The agent of the worker that started this process."""

    kind = "host_agent"

    def __init__(self) -> None:
        open_log("host_agent")  # Monarch's own bootstrap has imported it
        folder = Path(os.environ[FOLDER])
        self._lease, self._exit_statuses = Lease(folder), ExitStatuses(folder)
        self._beats, self._fork_servers = LeaseRenewal(self._lease), ForkServers()

    @concurrent_endpoint
    async def beat(self, number: int, received: int) -> None:
        """Renew the lease: the controller is alive and has the answer to beat `received`.

        Raises if this host's server is stopped, because it can then start and end no processes.
        """
        if processes.stands_still(os.getppid()):
            raise RuntimeError(f"process {os.getppid()}, which serves this host, is stopped")
        self._beats.renew(number, received)

    @concurrent_endpoint
    async def give_back(self) -> None:
        """Release the host: the worker ends all processes here, including this one."""
        self._lease.end()

    @concurrent_endpoint
    async def about(self) -> HostDescription:
        """Return the description of this host."""
        machine = await asyncio.to_thread(this_machine)
        found = await asyncio.to_thread(versions)
        return HostDescription(machine, socket.gethostname(), sys.executable, os.getppid(), found)

    @concurrent_endpoint
    async def ended(self, pid: int, wait_s: float) -> str | None:
        """Return how a process of this host ended, None while it runs. Waits at most `wait_s`."""
        if not await processes.wait_gone(pid, wait_s):
            return None
        records = [self._exit_statuses, *self._fork_servers.statuses]
        return await how_it_ended(pid, records) or f"its process {pid} has ended"

    @concurrent_endpoint
    async def fork_server(self, env: Mapping[str, str], modules: Sequence[str]) -> dict[str, str]:
        """Return the variables with which a process here is forked; empty if it cannot be."""
        return await self._fork_servers.environment(env, modules)

    @concurrent_endpoint
    async def kill(self, pids: Sequence[int]) -> None:
        """Kill processes that did not end on request, and the process groups that they lead."""
        for pid in pids:
            processes.kill_group(pid)

    @concurrent_endpoint
    async def started_processes(self, marks: Sequence[str]) -> list[int]:
        """Return live processes started by this worker with all these command-line arguments."""
        return processes.children_of(os.getppid(), marks)

    @concurrent_endpoint
    async def stacks(self, pids: Sequence[int], native: bool) -> list[StackDump]:
        """Return the Python stacks of processes of this host, or why there are none, in order."""
        return await dump_stacks(pids, native)

    @concurrent_endpoint
    async def sees(self, path: Path) -> str | None:
        """Return a file's first `LONGEST_LINE` characters of one line; None without such a file."""
        return await asyncio.to_thread(_first_line, path)

    @concurrent_endpoint
    async def has_folder(self, path: Path) -> bool:
        """Whether this host has such a folder."""
        return await asyncio.to_thread(path.is_dir)

    @concurrent_endpoint
    async def fetch_model(self, named: HubId, key: str, cache: Path) -> str:
        """Download a model into a cache of this host, if it is not there; return why it failed."""
        try:
            await asyncio.to_thread(hub.whole_model, named, key, cache)
        except ConfigError as error:
            return str(error)
        return ""


def _first_line(path: Path) -> str | None:
    try:
        with path.open() as file:
            return file.readline(LONGEST_LINE)
    except OSError:
        return None

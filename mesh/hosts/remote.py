"""A host offered by a worker: attached, monitored through its agent, lost when it is silent.

The controller sends beats; while the agent answers, the worker's lease is renewed. A host that is
silent for longer than its lease has ended all processes of the run, whatever cut it off: therefore
its work may then be assigned to others, and it is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh, attach_to_workers

from composer_mesh.mesh.actor import monarch_name
from composer_mesh.mesh.environment import IMPORT_PATHS, UMASK, python_module, without_noise
from composer_mesh.mesh.failures import cause_of
from composer_mesh.mesh.hosts import address as addresses
from composer_mesh.mesh.hosts.agent import HostAgent, HostDescription, differences, versions
from composer_mesh.mesh.hosts.host import end_client_at_exit, is_lost, unless_lost
from composer_mesh.mesh.monarch_log import LOGS
from composer_mesh.mesh.process_resources import ADDRESS, FOLDER
from composer_mesh.mesh.processes import BOOTSTRAP
from composer_mesh.mesh.spawned import until_ready
from composer_mesh.mesh.supervision import HostLost, MeshError, ProcessLate, call
from composer_mesh.mesh.waiting import BackgroundTasks

BEATS = 5
"""Beats of the controller per lease duration."""
MARGIN = 1.4
"""A host is lost after this many leases of silence; by then it has ended its processes."""
REFUSALS = 2
"""A worker whose port has refused this many connections is gone, with all that it started."""
ANSWER_PART = 0.8
"""The part of a beat in which the agent must answer; the rest is for checking its port.

So the checks do not delay the moment at which a silent host counts as lost.
"""
AGAIN_S = 1.0
LOOK_S = 5.0
"""How long one request to the agent waits for a process exit."""
ANSWER_S = 30.0
IMPORT_S = 120.0
"""Longest time until a fork server has imported its modules."""


LIKE_HERE = ("PYTHONPATH", IMPORT_PATHS, UMASK, LOGS)
"""Variables that processes on other hosts have from the controller."""


class HostRefused(MeshError):
    """A worker cannot serve this run: what was found, what is required, the repair."""


class RemoteHost:
    """One attached worker; `close` releases it, and it ends."""

    def __init__(
        self, name: str, address: str, lease_s: float, note_late: Callable[[ProcessLate], None]
    ) -> None:
        """`address` is a process address; `note_late` is called when the agent is started again."""
        self.name, self.address = name, address
        self._note_late = note_late
        self.lost: asyncio.Future[str] | None = asyncio.get_running_loop().create_future()
        self.about: HostDescription | None = None
        self._lease_s = lease_s
        self._mesh: HostMesh | None = None
        self._procs: ProcMesh | None = None
        self._agent: Any = None
        # Without beats its lease expires, and it ends its processes.
        self._beating = BackgroundTasks(
            lambda task, error: self.lose(f"{task} failed: {cause_of(error)}")
        )

    @property
    def channel(self) -> str:
        """Where it listens, without the identity of its process."""
        return addresses.channel_of(self.address)

    @property
    def mesh(self) -> HostMesh:
        if self._mesh is None:
            raise HostLost(self.name, "it is not attached")
        return self._mesh

    @property
    def known(self) -> HostDescription:
        """The host's description from the time it was attached."""
        if self.about is None:
            raise HostLost(self.name, "it is not attached")
        return self.about

    async def attach(self, deadline_s: float) -> None:
        """Attach, start the agent, compare versions. Raises `HostRefused`.

        The deadline covers all of it.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._attach()
        except (TimeoutError, MeshError) as error:
            if isinstance(error, HostRefused):
                raise
            why = str(error) or f"no answer within {deadline_s:g} s"
            raise HostRefused(
                f"{self.name} at {self.channel} could not be attached ({why}): is composer-mesh "
                "worker running there, with this --listen address, the authority of this run, the "
                "same Monarch and a port that this machine reaches?"
            ) from error
        self._beating.start(f"beats to {self.name}", self._beat())

    async def _attach(self) -> None:
        await self._until_it_listens()
        with without_noise():
            self._mesh = attach_to_workers(
                workers=[self.address], ca="trust_all_connections", name=monarch_name(self.name)
            )
        end_client_at_exit()
        try:
            await self._mesh.initialized
        except RuntimeError as error:
            raise MeshError(str(error).partition("\n\n")[0]) from error
        self._agent = await self._start_agent(self._mesh)
        self.about = await self.ask("about")
        if found := differences(self.name, versions(), self.about.versions):
            raise HostRefused(
                f"{'; '.join(found)}: install the same on all hosts, with the same composer-mesh"
            )
        await self.ask("beat", 1, 0)

    async def _start_agent(self, mesh: HostMesh) -> Any:
        """Start the agent's process until it is ready.

        A second start finds in memory what the first one read from a slow disk. Only an agent could
        kill the first, which does nothing and ends with the worker.
        """
        name = f"{self.name}-agent"
        while True:
            self._procs = mesh.spawn_procs(name=monarch_name(name))
            agent = self._procs.spawn("host_agent", HostAgent)
            try:
                await until_ready(agent, name, self.name, IMPORT_S)
            except ProcessLate as late:
                self._note_late(late)
            else:
                return agent

    async def close(self, deadline_s: float) -> None:
        """Release the host, whose worker then ends. Waits for its answer, at most `deadline_s`."""
        await self._beating.close()
        if self._agent is not None and self.lost is not None and not self.lost.done():
            with contextlib.suppress(MeshError):  # its lease expires then
                await self.ask("give_back", deadline_s=deadline_s)
        self.lose("it was given back")

    async def command(
        self, name: str, token: str, env: Mapping[str, str], preload: Sequence[str]
    ) -> BootstrapCommand:
        words = [name, token, str(self.known.server)]
        python, *arguments = python_module(BOOTSTRAP, *words, python=self.known.python)
        env = {**self._places(), **env}
        forked = await self.ask("fork_server", env, tuple(preload), deadline_s=IMPORT_S)
        return BootstrapCommand(python, None, arguments, {**env, **forked})

    def _places(self) -> dict[str, str]:
        """Return the environment that gives the same working directory and module paths as here."""
        return {
            **{name: os.environ[name] for name in LIKE_HERE if name in os.environ},
            FOLDER: str(Path.cwd()),
            ADDRESS: addresses.split(self.address)[1],
        }

    async def ended(self, pid: int) -> str:
        """Wait in short requests, so that a lost answer blocks only briefly."""
        while True:
            try:
                words: str | None = await self.ask("ended", pid, LOOK_S)
            except MeshError:
                words = None
                await asyncio.sleep(AGAIN_S)
            if words is not None:
                return words
            if self.lost is not None and self.lost.done():
                return self.lost.result()

    async def wait_gone(self, pid: int, deadline_s: float) -> bool:
        try:
            return await self.ask("ended", pid, deadline_s) is not None
        except MeshError:  # no agent answers: its lease ends the process
            return False

    async def kill(self, pids: Sequence[int]) -> None:
        """Wait until the agent has killed them, or the host is lost and has ended them itself.

        No replacement may start before one of both is certain.
        """
        while not is_lost(self):
            try:
                await self.ask("kill", list(pids))
                return
            except MeshError:
                await asyncio.sleep(AGAIN_S)

    async def started_processes(self, *marks: str) -> list[int]:
        try:
            found: list[int] = await self.ask("started_processes", list(marks))
        except MeshError:
            return []
        return found

    async def _beat(self) -> None:
        """Send beats until the host is silent for too long.

        Time is counted in beats, so that it does not pass while this process itself is paused.
        """
        loop, every_s = asyncio.get_running_loop(), self._lease_s / BEATS
        silent, refused, received, number = 0, 0, 1, 1
        while silent < BEATS * MARGIN:
            began, number = loop.time(), number + 1
            try:
                await self.ask("beat", number, received, deadline_s=every_s * ANSWER_PART)
                silent, refused, received = 0, 0, number
            except MeshError:
                gone = await self._listens(every_s * (1 - ANSWER_PART)) is False
                silent, refused = silent + 1, refused + 1 if gone else 0
            if refused >= REFUSALS:
                self.lose(f"nobody listens at {self.channel} any more")
                return
            await asyncio.sleep(max(0.0, every_s - (loop.time() - began)))
        self.lose(f"it gave no sign of life for {self._lease_s * MARGIN:g} s")

    async def _until_it_listens(self) -> None:
        """Wait for the port, since Monarch never retries an address that it could not reach."""
        while True:
            if await self._listens(AGAIN_S):
                return
            await asyncio.sleep(AGAIN_S)

    async def _listens(self, deadline_s: float) -> bool | None:
        """Whether the port accepts connections; None if the machine does not answer in time."""
        _, host, port = addresses.split(self.address)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), deadline_s)
        except ConnectionRefusedError:
            return False
        except (TimeoutError, OSError):
            return None
        writer.close()
        return True

    def lose(self, reason: str) -> None:
        """Mark the host as unreachable."""
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(f"its host {self.name} is lost: {reason}")

    async def ask(self, endpoint: str, *args: Any, deadline_s: float = ANSWER_S) -> Any:
        """Call an endpoint of the host's agent. Waits for its answer; raises `MeshError`."""
        if self._agent is None:
            raise HostLost(self.name, "it is not attached")
        reply = getattr(self._agent, endpoint).call_one(*args)
        name = f"host {self.name}"
        return await unless_lost(call(reply, deadline_s, name, endpoint), self)

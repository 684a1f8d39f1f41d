"""Live inspection of a run: its status file, servers and control socket.

Updates the status every 2 seconds and takes commands for the pools. It makes no decisions about the
run, and its failures do not end it.

Resizes the pools of a running run: which kinds are scalable, and within which bounds.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.configs import plugins
from composer_mesh.configs.schema import RunConfig
from composer_mesh.mesh.admin import TlsFiles, start_admin
from composer_mesh.mesh.failures import cause_of, recorded_by
from composer_mesh.mesh.machine import this_host
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import MeshError, Recorder
from composer_mesh.mesh.waiting import BackgroundTasks
from composer_mesh.services.directory.control import Command, Control, ControlRefused
from composer_mesh.services.directory.status import (
    ActorStatus,
    RunProgress,
    RunStatus,
    commands_for,
    write_status,
)
from composer_mesh.services.inspection.census import census
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.run.hosts import RunHosts
from composer_mesh.services.service import Service

SCALABLE = ("generator", "environment", "rollouts", "teacher_replay")
FIXED = {
    "trainer": "its ranks share every step's samples: set trainer.ranks before a run",
    "sdpo_teacher": "a step's signals are divided among them before it begins: set sdpo.replicas "
    "before a run",
    "reference": "a run has one of it",
    "hint_writer": "a run has one of it",
    "expert_server": "a run has one of it",
    "controller": "a run has one of it",
}
PER_CORE, FEW_CORES = 4, 16


class ResizablePool(Protocol):
    """Resizable replicas of one kind."""

    def __len__(self) -> int: ...

    async def resize(self, n: int) -> None: ...


class Scaling:
    """Resizes the pools of one run and records each change."""

    def __init__(
        self,
        pools: Mapping[str, ResizablePool],
        record: Callable[[str, str, str], None],
        largest: int | None = None,
        cores: int | None = None,
    ) -> None:
        """`cores` are those of all hosts, by default of this machine; they bound a pool's size."""
        self._pools, self._record = pools, record
        self._largest = largest or max(FEW_CORES, PER_CORE * (cores or os.cpu_count() or 1))

    async def scale(self, **wanted: Any) -> dict[str, dict[str, int]]:
        """Resize pools to the given replica counts; return the counts before and after.

        Refuses the complete request if one part is invalid. Waits until new replicas serve and old
        ones have ended.
        """
        if not wanted:
            raise ControlRefused("no pool was named: say for example generator=3")
        for kind, count in wanted.items():
            self._check(kind, count)
        changing = (self._resize(kind, count) for kind, count in wanted.items())
        changes = await asyncio.gather(*changing, return_exceptions=True)  # independent
        if failed := [change for change in changes if isinstance(change, BaseException)]:
            raise failed[0]
        return {
            kind: change
            for kind, change in zip(wanted, changes, strict=True)
            if not isinstance(change, BaseException)
        }

    def _check(self, kind: str, count: Any) -> None:
        if kind in FIXED:
            raise ControlRefused(f"{kind} does not scale during a run: {FIXED[kind]}")
        scalable = [name for name in SCALABLE if name in self._pools]
        if kind not in scalable:
            raise ControlRefused(
                f"{kind!r} is not a pool of this run: name one of {', '.join(scalable)}"
            )
        if type(count) is not int or not 1 <= count <= self._largest:
            raise ControlRefused(
                f"{kind} is {count!r} but must be a whole number from 1 to {self._largest}, "
                f"{PER_CORE} processes for each core of this machine and {FEW_CORES} at least"
            )

    async def _resize(self, kind: str, count: int) -> dict[str, int]:
        pool = self._pools[kind]
        before = len(pool)
        try:
            await pool.resize(count)
        except Exception as error:
            self._record("pool_not_resized", kind, f"{before} to {count}: {error}")
            raise
        self._record("pool_resized", kind, f"{before} to {len(pool)}")
        return {"before": before, "after": len(pool)}


STATUS_EVERY_S = 2.0


def stopped(actors: Sequence[ActorStatus]) -> tuple[ActorStatus, ...]:
    """Return the actors of a run after its end: dead ones stay so, with the reason."""
    nothing: dict[str, Any] = dict.fromkeys(("pid", "outstanding", "rss_bytes", "cpu_percent"))
    return tuple(
        replace(one, **nothing)
        if one.state == "dead"
        else replace(one, **nothing, state="stopped", activity="")
        for one in actors
    )


class Inspectable(Protocol):
    """The part of a mesh that is shown."""

    @property
    def pools(self) -> Mapping[str, Service]: ...

    async def describe(self) -> list[ActorStatus]: ...


class RunWatch:
    """Status and control of one run; `progress` returns how far it is.

    `commands` are accepted in addition to `scale`.
    """

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        view: RunView,
        record: Recorder,
        progress: Callable[[], RunProgress],
        commands: Mapping[str, Command] | None = None,
    ) -> None:
        self._root, self._config = root, config
        self._view, self._record, self._progress = view, record, progress
        self._commands = dict(commands or {})
        self._known: dict[str, Any] = {}
        self._hosts: RunHosts | None = None
        self._writer = ThreadPoolExecutor(1, "run-status")
        self._display_lost = self._stopped = False
        self._shown: tuple[ActorStatus, ...] = ()
        self._looking = asyncio.Lock()

    async def open(self, host: MeshHost, transport: str, hosts: RunHosts) -> None:
        """Start the servers, before the first actor, and show the commands for inspection."""
        start_telemetry = plugins.load("telemetry", "monarch") if self._config.telemetry else None
        telemetry = None if start_telemetry is None else await start_telemetry()
        admin = await start_admin(host)
        self.opened(transport, admin, telemetry)
        if admin.startswith("https:") and (tls := TlsFiles.of_environment()) is not None:
            self._known["admin_tls"] = asdict(tls)
        self._hosts = hosts
        self._view.hints(commands_for(self._root, self._config.telemetry))

    def opened(self, transport: str, admin: str | None, telemetry: Path | None) -> None:
        """Set the servers' addresses; the status is written from now on."""
        store = None if telemetry is None else str(telemetry)
        self._known = {"admin_url": admin, "telemetry_socket": store, "transport": transport}

    @asynccontextmanager
    async def over(self, mesh: Inspectable) -> AsyncIterator[None]:
        """Update the status and take commands while the block runs."""
        watching = BackgroundTasks(recorded_by(self._record))
        watching.start("status", self._watch(mesh))
        try:
            async with AsyncExitStack() as open_while_it_runs:
                await self._take_commands(mesh, open_while_it_runs)
                yield
        finally:
            await watching.close()

    async def ended(self, state: str) -> None:
        """Write the run's final state to its status file, with its last actors as stopped ones.

        Waits until it is written, even if the caller is cancelled; a disk error is recorded.
        """
        self._check_display()
        if not self._known:
            return
        try:
            await asyncio.shield(self._write(state=state, actors=stopped(self._shown)))
        except OSError as error:
            self._cannot_tell(error)

    async def _take_commands(self, mesh: Inspectable, until: AsyncExitStack) -> None:
        scaling = Scaling(
            mesh.pools, self._record, cores=self._hosts.cores if self._hosts else None
        )

        async def scale(**wanted: Any) -> dict[str, dict[str, int]]:
            changes = await scaling.scale(**wanted)
            try:
                await self._look(mesh)  # whoever requested it finds the new replicas in the tree
            except OSError as error:  # the pools have changed nevertheless
                self._cannot_tell(error)
            return changes

        commands = {"scale": scale, **self._commands}
        try:
            failed = recorded_by(self._record)
            await until.enter_async_context(Control(self._root, commands, failed))
        except OSError as error:
            self._record("no_commands", "", f"there is no control socket: {error}")

    async def _watch(self, mesh: Inspectable) -> None:
        while True:
            self._check_display()
            try:
                await self._look(mesh)
            except OSError as error:  # a disk may take the next one
                self._cannot_tell(error)
            await asyncio.sleep(STATUS_EVERY_S)

    async def _look(self, mesh: Inspectable) -> None:
        """Show the actors as they are now, on the screen and in the status file."""
        async with self._looking:  # an earlier look must not be written after a later one
            with suppress(MeshError):  # a dead actor ends the run through the supervisor
                self._shown = census(await mesh.describe(), mesh.pools, self._shown)
                await self._show(self._shown)
                self._can_tell()

    async def _show(self, actors: Sequence[ActorStatus]) -> None:
        self._view.actors(actors)
        await self._write(state="running", actors=tuple(actors))

    def _check_display(self) -> None:
        """Record once that the run is no longer shown."""
        if self._view.failure and not self._display_lost:
            self._display_lost = True
            self._record("display_lost", "", self._view.failure)

    def _cannot_tell(self, error: OSError) -> None:
        """Record that the status is not written, once until it is again."""
        if not self._stopped:
            self._stopped = True
            self._record("status_stopped", "", cause_of(error))

    def _can_tell(self) -> None:
        if self._stopped:
            self._stopped = False
            self._record("status_resumed", "", "the status is written again")

    def _write(self, **changes: Any) -> asyncio.Future[None]:
        """Write the status in a thread after earlier writes, since the disk may be remote."""
        self._known |= changes
        progress = self._progress()
        status = RunStatus(
            pid=os.getpid(),
            host=this_host(),
            hostname=socket.gethostname(),
            steps=self._config.steps,
            policy_version=progress.step,
            **progress._asdict(),
            hosts=dict(self._hosts.names) if self._hosts else {},
            **self._known,
        )
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._writer, write_status, self._root, status)

"""Starts and stops the actors of a run: one process with one actor in it, by name.

Callers decide which actors a run has; `supervision` handles their deaths.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from monarch.actor import ProcMesh

from composer_mesh.mesh.actor import MeshActor, collect_rarely, leave_out_loaded, monarch_name
from composer_mesh.mesh.connection_guard import guard_connections
from composer_mesh.mesh.environment import class_environment
from composer_mesh.mesh.failures import recorded_by
from composer_mesh.mesh.heartbeat import ActivityLog, HeartbeatRules, wait_until_silent
from composer_mesh.mesh.hosts.host import Host, LocalHost, is_lost, unless_lost
from composer_mesh.mesh.machine import NAME
from composer_mesh.mesh.spawned import Deadlines, SpawnedActor, until_ready
from composer_mesh.mesh.supervision import (
    STOPPED,
    ActorDied,
    FaultPolicy,
    HostLost,
    MeshError,
    ProcessLate,
    Supervisor,
    call,
    heard,
)
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, reported_to_loop

T = TypeVar("T")

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0


class MeshHost:
    """Owns this run's processes, on this machine and on other hosts that join.

    `async with MeshHost(supervisor) as host:` stops them all at the end of the block. With
    `heartbeat`, an actor that hangs is killed and reported as dead. With `preload`, processes are
    forked from one that has imported these modules, none of which imports Monarch. This process
    collects garbage seldom from then on.
    """

    name = NAME

    def __init__(
        self,
        supervisor: Supervisor | None = None,
        start_deadline_s: float = START_DEADLINE_S,
        stop_deadline_s: float = STOP_DEADLINE_S,
        heartbeat: HeartbeatRules | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        guard_connections()
        leave_out_loaded()
        collect_rarely()
        self.supervisor = supervisor
        self.activity = ActivityLog()
        self.deadlines = Deadlines(self._note)
        self._hang_s: dict[str, float] = {}
        self._preload = tuple(preload)
        self.heartbeat = heartbeat
        self.started: Callable[[SpawnedActor], None] | None = None
        """Called with each actor that answers for the first time."""
        self.capacity_wait_s = 0.0
        """Longest wait for a host with capacity, for processes whose host was lost."""
        self._start_deadline_s = start_deadline_s
        self._stop_deadline_s = stop_deadline_s
        self._token = uuid.uuid4().hex[:12]
        self.here = LocalHost()
        self._hosts: dict[str, Host] = {}
        self._watching = BackgroundTasks(self._task_failed)
        self._killing = BackgroundTasks(self._task_failed)
        self._spawned: dict[str, SpawnedActor] = {}
        self._starting: set[str] = set()
        self._closing = False
        self._watches: dict[str, list[asyncio.Task[None]]] = {}

    async def __aenter__(self) -> MeshHost:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def actors(self) -> list[SpawnedActor]:
        """The actors that were started and not stopped, in order of their start."""
        return list(self._spawned.values())

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The joined hosts that are not lost, by name, without this machine."""
        return {name: one for name, one in self._hosts.items() if not is_lost(one)}

    def join(self, host: Host) -> None:
        """Allow actors to be started on a host; replaces a lost host of the same name."""
        self._hosts[host.name] = host

    async def spawn(
        self,
        name: str,
        actor_class: type[MeshActor],
        *args: Any,
        on: str | None = None,
        env: Mapping[str, str] | None = None,
        policy: FaultPolicy = FaultPolicy.ESCALATE,
        **kwargs: Any,
    ) -> SpawnedActor:
        """Start one process named `name` with one actor in it. Waits until the actor answers.

        `on` names a host that has joined, default this machine. A process that is late is killed
        and started again, until the deadline of a start has passed. Raises `HostLost` and
        `ProcessLate`.
        """
        self._check(name, actor_class)
        if self._closing:
            raise MeshError(f"{name} is not started: its host is closing")
        host = self._host(on)
        self._starting.add(name)
        try:
            spawned = await self._start_repeatedly(
                host, name, actor_class, policy, args, kwargs, env or {}
            )
        finally:
            self._starting.discard(name)
        self._spawned[name] = spawned
        self._watches[name] = [
            self._watching.start(f"waiting for the end of {name}", self._watch_process(spawned))
        ]
        if self.heartbeat is not None:
            answers = self._watch_answers(spawned, self._heartbeat_of(name, self.heartbeat))
            self._watches[name].append(self._watching.start(f"heartbeat of {name}", answers))
        if self.started is not None:
            self.started(spawned)
        return spawned

    def _heartbeat_of(self, name: str, rules: HeartbeatRules) -> HeartbeatRules:
        """Return the rules of a process: one that replaces a hung one has twice the time to answer.

        It may do the same work, which may hold Python's lock or wait for a core.
        """
        hang_s = self._hang_s.pop(slot_of(name), rules.hang_s)
        return HeartbeatRules(rules.every_s, max(hang_s, rules.hang_s))

    def _note(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        if self.supervisor is not None:
            self.supervisor.note(kind, actor, detail, **fields)

    def _task_failed(self, name: str, error: BaseException) -> None:
        """End the run: an actor must be watched, and killable."""
        if self.supervisor is None:
            reported_to_loop(name, error)
            return
        recorded_by(self.supervisor.note)(name, error)
        self.supervisor.fail(error)

    async def _watch_answers(self, spawned: SpawnedActor, rules: HeartbeatRules) -> None:
        """Kill an actor that does not answer, unless it is known to be dead."""
        await wait_until_silent(
            lambda: spawned.call("describe", deadline_s=2 * rules.hang_s), rules, spawned.last
        )
        if spawned.alive:
            self._hang_s[slot_of(spawned.name)] = next_s = 2 * rules.hang_s
            about = {"host": spawned.host.name, "kind": spawned.kind}
            detail = f"{rules.silence()}; its replacement has {next_s:g} s"
            self._note("actor_hung", spawned.name, detail, **about)
            self.kill(spawned, f"{rules.silence()} and was killed")

    async def _watch_process(self, spawned: SpawnedActor) -> None:
        """Report to the supervisor when the process or its host is gone, with the reason."""
        try:
            reason = await unless_lost(spawned.host.ended(spawned.pid), spawned.host)
        except HostLost as error:
            _, reason = error.args
        self.lost(spawned, reason)

    def _host(self, name: str | None) -> Host:
        if name is None:
            return self.here
        found = self._hosts.get(name)
        if found is None:
            raise HostLost(name, f"it never joined; {', '.join(self.hosts) or 'no host'} did")
        if found.lost is not None and found.lost.done():
            raise HostLost(name, found.lost.result())
        return found

    async def _start_repeatedly(
        self, host: Host, name: str, actor_class: type[MeshActor], *given: Any
    ) -> SpawnedActor:
        """Start a process until it is ready, or late at the deadline.

        A second start finds in memory what the first one read from a slow disk.
        """
        deadline, starts = time.monotonic() + self._start_deadline_s, 0
        while True:
            starts += 1
            try:
                return await self._start_on(host, name, actor_class, *given)
            except ProcessLate as late:
                if self._closing or time.monotonic() >= deadline:
                    raise ProcessLate(name, host.name, late.limit, starts) from None
                about = {"host": host.name, "kind": actor_class.kind}
                self._note("start_repeated", name, late.why_repeated, **about)

    async def _start_on(
        self,
        host: Host,
        name: str,
        actor_class: type[MeshActor],
        policy: FaultPolicy,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> SpawnedActor:
        env = class_environment(actor_class) | dict(env)
        command = await unless_lost(host.command(name, self._token, env, self._preload), host)
        procs = host.mesh.spawn_procs(name=monarch_name(name), bootstrap_command=command)
        starting = self._start(host, procs, name, actor_class, policy, args, kwargs)
        try:
            return await unless_lost(starting, host)
        except BaseException:
            await self._abandon(host, name, procs)
            raise

    async def _start(
        self,
        host: Host,
        procs: ProcMesh,
        name: str,
        actor_class: type[MeshActor],
        policy: FaultPolicy,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> SpawnedActor:
        ref = procs.spawn(monarch_name(name), actor_class, *args, **kwargs)
        mesh_name = await until_ready(ref, name, host.name, self._start_deadline_s)
        death: asyncio.Future[ActorDied] | None = None
        if self.supervisor is not None:
            about_it = {"host": host.name, "kind": actor_class.kind}
            death = self.supervisor.watch(mesh_name, name, policy, **about_it)
        about: dict[str, Any] = await call(
            ref.describe.call_one(), self._start_deadline_s, name, "describe"
        )
        pid: int = about["pid"]
        return SpawnedActor(
            name,
            about["kind"],
            ref,
            pid,
            procs,
            host,
            death,
            activity=self.activity,
            deadlines=self.deadlines,
        )

    def _check(self, name: str, actor_class: type[MeshActor]) -> None:
        if name in self._spawned or name in self._starting:
            raise ValueError(f"an actor named {name!r} already runs here: choose another name")
        if not issubclass(actor_class, MeshActor):
            raise TypeError(
                f"{actor_class.__name__} is not a MeshActor: derive it from composer_mesh.MeshActor"
            )

    def lost(self, spawned: SpawnedActor, reason: str) -> None:
        """Report a death that a caller noticed, perhaps before Monarch does."""
        if self.supervisor is not None:
            self.supervisor.lost(spawned.name, reason)

    def kill(self, spawned: SpawnedActor, reason: str) -> None:
        """Kill an unresponsive actor and its child processes; record `reason` as its death."""
        self._killing.start(f"killing {spawned.name}", spawned.host.kill([spawned.pid]))
        self.lost(spawned, reason)

    async def stop(self, spawned: SpawnedActor) -> None:
        """Stop one actor and its process. Waits until it is gone; kills it if it does not stop.

        The process of a dead actor, which may hang, is killed directly; its child processes are
        killed too.
        """
        host, pid = spawned.host, spawned.pid
        can_stop = spawned.alive and not is_lost(host)
        self._spawned.pop(spawned.name, None)
        self._expect(spawned.name)
        await cancel_and_wait(self._watches.pop(spawned.name, []))
        if can_stop and not await host.wait_gone(pid, 0):
            await self._stop_procs(spawned.procs)
            await host.wait_gone(pid, self._stop_deadline_s)
        if not is_lost(host):
            await host.kill([pid])
            await host.wait_gone(pid, self._stop_deadline_s)
        # Waiters, and readers of what it published, must be notified of a planned end too.
        if spawned.death is not None and not spawned.death.done():
            spawned.death.set_result(ActorDied(spawned.name, STOPPED))

    async def close(self) -> None:
        """Stop every process of this run and start no more. None of them is left afterwards."""
        self._closing = True
        await asyncio.gather(*(self.stop(spawned) for spawned in self.actors))
        for host in (self.here, *self.hosts.values()):
            await self._kill(host, await host.started_processes(self._token))
        await self._killing.wait()
        await asyncio.to_thread(self.here.close)

    async def _abandon(self, host: Host, name: str, procs: ProcMesh) -> None:
        """Clean up a process whose actor never answered, so that its pid is unknown.

        It is killed: a process that is requested to stop while it still imports may abort noisily.
        """
        self._expect(name)
        if is_lost(host):
            return
        await self._kill(host, await host.started_processes(self._token, name))
        await self._stop_procs(procs)
        await self._kill(
            host, await host.started_processes(self._token, name)
        )  # in case it was just being started

    async def _stop_procs(self, procs: ProcMesh) -> None:
        stopping = procs.stop().as_asyncio()
        stopping.add_done_callback(heard)  # a mesh that already died has nothing left to stop
        await asyncio.wait([stopping], timeout=self._stop_deadline_s)
        stopping.cancel()

    async def _kill(self, host: Host, pids: list[int]) -> None:
        await host.kill(pids)
        for pid in pids:
            await host.wait_gone(pid, self._stop_deadline_s)

    def _expect(self, name: str) -> None:
        if self.supervisor is not None:
            self.supervisor.expect_stop(name)


def slot_of(name: str) -> str:
    """Return an actor's name without the number of its process.

    >>> slot_of("generator-0.2"), slot_of("trainer")
    ('generator-0', 'trainer')
    """
    return re.sub(r"\.\d+$", "", name)

"""The only place where processes start and stop: one process with one actor in it, by name.

Which actors a run has is decided elsewhere; what they do when one dies is `supervision`.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import HostMesh, ProcMesh, this_host

from composer_mesh.mesh import processes
from composer_mesh.mesh.actor import MeshActor, monarch_name
from composer_mesh.mesh.environment import without_noise
from composer_mesh.mesh.heartbeat import HeartbeatRules, LastWord, wait_until_silent
from composer_mesh.mesh.supervision import (
    ActorDied,
    FaultPolicy,
    MeshError,
    Supervisor,
    call,
    heard,
)
from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 10.0


@dataclass(frozen=True, eq=False)
class SpawnedActor:
    """An actor: its name in this run, its kind, the reference to call it by, its process.

    `death` is done once it is known to be gone; None where nobody supervises.
    """

    name: str
    kind: str
    ref: Any
    pid: int
    actor_class: type[MeshActor]
    procs: ProcMesh = field(repr=False)
    death: asyncio.Future[ActorDied] | None = field(default=None, repr=False)
    last: LastWord = field(default_factory=LastWord, repr=False)

    @property
    def alive(self) -> bool:
        """Whether nobody has noticed its end."""
        return self.death is None or not self.death.done()

    async def call(
        self, endpoint: str, *args: Any, deadline_s: float = 120.0, **kwargs: Any
    ) -> Any:
        """Call one endpoint. Waits for its answer, at most `deadline_s`."""
        reply = getattr(self.ref, endpoint).call_one(*args, **kwargs)
        answer: Any = await call(reply, deadline_s, self.name, endpoint, self.death)
        self.last.heard()
        return answer


async def while_alive(actor: SpawnedActor, work: Coroutine[Any, Any, T], news_s: float = 0.0) -> T:
    """Work that also ends, by `ActorDied`, with an actor whose memory others may be reading.

    A read from a process that is gone may hang, or fail before the end of the process is known:
    that long is an error of the work held back to see whether it comes of such an end.
    """
    task, death = asyncio.ensure_future(work), actor.death
    either: list[asyncio.Future[Any]] = [task, *([death] if death else [])]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        doubtful = bool(news_s) and task.done() and _may_come_of_a_death(task)
        if death is not None and doubtful:
            await asyncio.wait([death], timeout=news_s)
        if death is not None and death.done() and (doubtful or not task.done()):
            raise ActorDied(*death.result().args)
        return task.result()
    finally:
        await cancel_and_wait([task])


def _may_come_of_a_death(task: asyncio.Future[Any]) -> bool:
    """Whether work has failed, and not for a death that is known."""
    failed = None if task.cancelled() else task.exception()
    return failed is not None and not isinstance(failed, ActorDied)


class MeshHost:
    """The owner of this run's processes on this machine.

    `async with MeshHost(supervisor) as host:` stops them all at the end of the block. With a
    `heartbeat` an actor that is silent for too long is killed, and has died as any other.
    """

    name = "localhost"

    def __init__(
        self,
        supervisor: Supervisor | None = None,
        start_deadline_s: float = START_DEADLINE_S,
        stop_deadline_s: float = STOP_DEADLINE_S,
        heartbeat: HeartbeatRules | None = None,
    ) -> None:
        self.supervisor = supervisor
        self.heartbeat = heartbeat
        self._start_deadline_s = start_deadline_s
        self._stop_deadline_s = stop_deadline_s
        self._token = uuid.uuid4().hex[:12]
        self._host: HostMesh | None = None
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
        """The actors that were started and not stopped, in the order of their start."""
        return list(self._spawned.values())

    @property
    def mesh(self) -> HostMesh:
        """Monarch's view of this machine; the first use starts Monarch in this process."""
        if self._host is None:
            with without_noise():
                self._host = this_host()
        return self._host

    async def spawn(
        self,
        name: str,
        actor_class: type[MeshActor],
        *args: Any,
        env: Mapping[str, str] | None = None,
        policy: FaultPolicy = FaultPolicy.ESCALATE,
        **kwargs: Any,
    ) -> SpawnedActor:
        """Start one process named `name` with one actor in it. Waits until the actor answers."""
        self._check(name, actor_class)
        if self._closing:
            raise MeshError(f"{name} is not started: its host is closing")
        self._starting.add(name)
        procs = self.mesh.spawn_procs(
            name=monarch_name(name), bootstrap_command=self._command(name, env)
        )
        try:
            spawned = await self._start(procs, name, actor_class, policy, args, kwargs)
        except BaseException:
            await self._abandon(name, procs)
            raise
        finally:
            self._starting.discard(name)
        self._spawned[name] = spawned
        self._watches[name] = [asyncio.create_task(self._watch_process(spawned))]
        if self.heartbeat is not None:
            listening = asyncio.create_task(self._watch_answers(spawned, self.heartbeat))
            self._watches[name].append(listening)
        return spawned

    async def _watch_answers(self, spawned: SpawnedActor, rules: HeartbeatRules) -> None:
        """Kill an actor that does not answer, unless it is known to be dead."""
        await wait_until_silent(
            lambda: spawned.call("describe", deadline_s=2 * rules.hang_s), rules, spawned.last
        )
        if spawned.alive:
            if self.supervisor is not None:
                about = {"host": self.name, "kind": spawned.kind}
                self.supervisor.note("actor_hung", spawned.name, rules.silence(), **about)
            self.kill(spawned, f"{rules.silence()} and was killed")

    async def _watch_process(self, spawned: SpawnedActor) -> None:
        """Tell the supervisor when the process is gone, and how it ended.

        Monarch tells too, but only when it asks next, and then it may need half a minute. Where it
        has collected the process first, how it ended is not known.
        """
        reason = await processes.end_of_child(spawned.pid)
        if reason is None:
            await processes.wait_gone(spawned.pid, math.inf)
        self.lost(spawned, reason or f"its process {spawned.pid} has ended")

    async def _start(
        self,
        procs: ProcMesh,
        name: str,
        actor_class: type[MeshActor],
        policy: FaultPolicy,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> SpawnedActor:
        ref = procs.spawn(monarch_name(name), actor_class, *args, **kwargs)
        mesh_name: str = await call(ref._name, self._start_deadline_s, name, "spawn")
        death: asyncio.Future[ActorDied] | None = None
        if self.supervisor is not None:
            about_it = {"host": self.name, "kind": actor_class.kind}
            death = self.supervisor.watch(mesh_name, name, policy, **about_it)
        about: dict[str, Any] = await call(
            ref.describe.call_one(), self._start_deadline_s, name, "describe"
        )
        return SpawnedActor(name, about["kind"], ref, about["pid"], actor_class, procs, death)

    def _check(self, name: str, actor_class: type[MeshActor]) -> None:
        if name in self._spawned or name in self._starting:
            raise ValueError(f"an actor named {name!r} already runs here: choose another name")
        if not issubclass(actor_class, MeshActor):
            raise TypeError(
                f"{actor_class.__name__} is no MeshActor: derive it from mesh.actor.MeshActor"
            )

    def _command(self, name: str, env: Mapping[str, str] | None) -> BootstrapCommand:
        arguments = ["-m", "composer_mesh.mesh.child", name, self._token, str(os.getpid())]
        return BootstrapCommand(sys.executable, None, arguments, dict(env or {}))

    def lost(self, spawned: SpawnedActor, reason: str) -> None:
        """Take note of a death that a caller heard of, perhaps before Monarch tells."""
        if self.supervisor is not None:
            self.supervisor.lost(spawned.name, reason)

    def kill(self, spawned: SpawnedActor, reason: str) -> None:
        """End an actor that is beyond asking, and what it started; it has died of `reason`."""
        processes.kill_group(spawned.pid)
        self.lost(spawned, reason)

    async def stop(self, spawned: SpawnedActor) -> None:
        """Stop one actor and its process. Waits until the process is gone, kills it if it stays.

        The process of a dead actor, which may hang, is not asked; nothing that it started stays.
        """
        asked = spawned.alive and processes.is_alive(spawned.pid)
        self._spawned.pop(spawned.name, None)
        self._expect(spawned.name)
        await cancel_and_wait(self._watches.pop(spawned.name, []))
        if asked:
            await self._stop_procs(spawned.procs)
            await processes.wait_gone(spawned.pid, self._stop_deadline_s)
        processes.kill_group(spawned.pid)
        await processes.wait_gone(spawned.pid, self._stop_deadline_s)
        # Whoever waits for it, or reads what it had published, must hear of a planned end too.
        if spawned.death is not None and not spawned.death.done():
            spawned.death.set_result(ActorDied(spawned.name, "it was stopped"))

    async def close(self) -> None:
        """Stop every process of this run and start no more. Afterwards none of them is left."""
        self._closing = True
        await asyncio.gather(*(self.stop(spawned) for spawned in self.actors))
        await self._kill(processes.children_with(self._token))

    async def _abandon(self, name: str, procs: ProcMesh) -> None:
        """Take back a process whose actor never answered, and whose id it therefore never told.

        It is killed: one that is asked to leave while it still imports may abort noisily.
        """
        self._expect(name)
        await self._kill(self._born(name))
        await self._stop_procs(procs)
        await self._kill(self._born(name))  # where it was only being born

    def _born(self, name: str) -> list[int]:
        ours = set(processes.children_with(self._token))
        return sorted(ours.intersection(processes.children_with(name)))

    async def _stop_procs(self, procs: ProcMesh) -> None:
        stopping = procs.stop().as_asyncio()
        stopping.add_done_callback(heard)  # a mesh that already died has nothing left to stop
        await asyncio.wait([stopping], timeout=self._stop_deadline_s)
        stopping.cancel()

    async def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            processes.kill(pid)
        for pid in pids:
            await processes.wait_gone(pid, self._stop_deadline_s)

    def _expect(self, name: str) -> None:
        if self.supervisor is not None:
            self.supervisor.expect_stop(name)

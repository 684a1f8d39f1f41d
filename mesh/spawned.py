"""A running actor: how to call it, its deadlines, and how to work with it until it dies.

`spawn` starts and stops it. Deadlines bound the time without progress, and double where they were
not met:

    call begins ... progress ... progress ............| deadline
                                 <--- no progress --->

A call whose deadline has passed may be repeated on the same or another process of its kind. Work is
not tried again under a deadline that it could not meet: in a run, the next one of the same kind and
endpoint has twice the time. After `most` expiries the error counts as one of the work itself, which
no new process mends.

Waits until a process that Monarch starts is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from monarch.actor import ProcMesh
from monarch.config import get_global_config

from composer_mesh.mesh.heartbeat import ActivityLog, Busy, LastAnswer
from composer_mesh.mesh.hosts.host import Host
from composer_mesh.mesh.progress import ProgressReport
from composer_mesh.mesh.supervision import (
    ActorDied,
    DeadlineExceeded,
    ProcessLate,
    Recorder,
    RemoteError,
    call,
)
from composer_mesh.mesh.waiting import unless

TOO_LATE = "error spawning proc mesh: statuses: Timeout"
"""How Monarch says that a process was not ready in time: 30 s. With a higher limit, Monarch 0.7
waits on without ever finding it ready."""


async def until_ready(ref: Any, actor: str, host: str, deadline_s: float) -> str:
    """Wait until the process of the actor mesh `ref` is ready; return Monarch's name of the mesh.

    Raises `ProcessLate` after Monarch's limit, and the errors of `call`.
    """
    try:
        mesh_name: str = await call(ref._name, deadline_s, actor, "spawn")
    except RemoteError as error:
        if TOO_LATE in error.text:
            limit = str(get_global_config()["mesh_proc_spawn_max_idle"])
            raise ProcessLate(actor, host, limit, 1) from None
        raise
    return mesh_name


Group = Callable[[], Sequence["SpawnedActor"]]

_group: ContextVar[Group | None] = ContextVar("working_together", default=None)


def record_nothing(_kind: str, _actor: str, _detail: str, /, **_fields: Any) -> None:
    """Drop an event."""


@contextmanager
def working_together(actors: Group) -> Iterator[None]:
    """Let the progress of any of some actors count for all calls that a block starts.

    Their work waits for each other, such as a rank's for the others in a collective.
    """
    token = _group.set(actors)
    try:
        yield
    finally:
        _group.reset(token)


class Deadlines:
    """The deadlines of one owner's calls, by kind of actor and endpoint.

    `most` is how often one deadline is doubled: not at all outside a run.
    """

    def __init__(self, record: Recorder = record_nothing) -> None:
        self._record, self.most = record, 0
        self._doubled: dict[tuple[str, str], int] = {}

    def of(self, kind: str, endpoint: str, deadline_s: float) -> float:
        """Return the seconds without progress that a call may take, of `deadline_s` at first."""
        return float(deadline_s * 2 ** self._doubled.get((kind, endpoint), 0))

    def missed(self, actor: SpawnedActor, endpoint: str, deadline_s: float, bound_s: float) -> bool:
        """Double the deadline of a call that has missed `bound_s`; return whether it was the last.

        Calls that missed the same deadline together double it once.
        """
        key, now_s = (actor.kind, endpoint), self.of(actor.kind, endpoint, deadline_s)
        doubled = self._doubled.get(key, 0)
        if not self.most or bound_s < now_s:
            return False
        if doubled >= self.most:
            return True
        self._doubled[key] = doubled + 1
        detail = (
            f"{endpoint}: no progress within {bound_s:g} s, so the next one has {2 * now_s:g} s"
        )
        about = {"host": actor.host.name, "kind": actor.kind}
        self._record("deadline_doubled", actor.name, detail, **about)
        return False


class Patience:
    """Decides how much longer a call is waited for whose deadline has passed."""

    def __init__(self, actor: SpawnedActor, endpoint: str, deadline_s: float) -> None:
        self._actor, self._endpoint, self._deadline_s = actor, endpoint, deadline_s
        self.bound_s = actor.deadlines.of(actor.kind, endpoint, deadline_s)
        self._group, self._began = _group.get(), asyncio.get_running_loop().time()

    async def more_s(self) -> float:
        """Return the seconds until the call may be late again; raises `DeadlineExceeded`.

        A call that waits for other actors has twice the time, so that theirs end first.
        """
        others = [] if self._group is None else self._group()
        actors = [self._actor]
        if self._actor in others:
            actors += [one for one in others if one is not self._actor]
        found = await asyncio.gather(*(actor.progress(self.bound_s) for actor in actors))
        own = found[0]
        since_s = asyncio.get_running_loop().time() - self._began
        silent_s = min([since_s, *(one.age_s for one in found if one is not None and one.count)])
        allowed_s = self.bound_s * (2 if own is not None and own.waits_for else 1)
        if silent_s < allowed_s:
            return allowed_s - silent_s
        final = self._actor.deadlines.missed(
            self._actor, self._endpoint, self._deadline_s, self.bound_s
        )
        last = "" if own is None or not own.count else str(own)
        raise DeadlineExceeded(self._actor.name, self._endpoint, allowed_s, last, final)


T = TypeVar("T")

DESCRIBE = "describe"
"""The endpoint that answers immediately, even while the actor's work makes no progress."""
PROGRESS_S = 30.0
"""Longest wait for a report of progress; a silent actor counts as hung after as long by default."""
ACTIVITY_S = 5.0
"""Longest wait for an actor's busy intervals, which are shown and nothing else."""


@dataclass(frozen=True, eq=False)
class SpawnedActor:
    """A running actor: its name in this run, its kind, its Monarch reference, its process.

    `death` is done once it is known to be dead; None where it is not supervised. `host` is its
    host.
    """

    name: str
    kind: str
    ref: Any
    pid: int
    procs: ProcMesh = field(repr=False)
    host: Host = field(repr=False)
    death: asyncio.Future[ActorDied] | None = field(default=None, repr=False)
    last: LastAnswer = field(default_factory=LastAnswer, repr=False)
    activity: ActivityLog = field(default_factory=ActivityLog, repr=False)
    deadlines: Deadlines = field(default_factory=Deadlines, repr=False)

    @property
    def alive(self) -> bool:
        """Whether its death has not been noticed."""
        return self.death is None or not self.death.done()

    async def call(
        self, endpoint: str, *args: Any, deadline_s: float = 120.0, **kwargs: Any
    ) -> Any:
        """Call one endpoint. Waits for its answer while the actor makes progress.

        Raises `DeadlineExceeded` after `deadline_s` without progress, or a multiple of it where the
        same work has missed it before.
        """
        patience = Patience(self, endpoint, deadline_s)
        late = None if endpoint == DESCRIBE else patience.more_s
        reply = getattr(self.ref, endpoint).call_one(*args, **kwargs)
        with self.activity.call(self.name, endpoint):
            answer: Any = await call(reply, patience.bound_s, self.name, endpoint, self.death, late)
        self.last.record_answer()
        return answer

    async def progress(self, deadline_s: float) -> ProgressReport | None:
        """Return the actor's progress; None where it does not answer or reports none."""
        try:
            return ProgressReport.of(
                await self.call(DESCRIBE, deadline_s=min(deadline_s, PROGRESS_S))
            )
        except Exception:  # noqa: BLE001  whatever its class raises there, it reports nothing
            return None

    async def take_activity(self) -> list[Busy]:
        """Return the intervals in which it served other actors, by this host's clock.

        Empty where it does not answer. Another host's clock counts as wrong by as much as its
        reading lies outside of the time of this call.
        """
        reply, sent = self.ref.take_activity.call_one(), time.time()
        try:
            answer: tuple[list[Busy], float] = await call(
                reply, ACTIVITY_S, self.name, "take_activity", self.death
            )
        except Exception:  # noqa: BLE001  whatever its class raises there, it reports nothing
            return []
        return [replace(one, actor=self.name) for one in moved(*answer, sent, time.time())]


def moved(busy: Sequence[Busy], there: float, sent: float, received: float) -> list[Busy]:
    """Return intervals by this host's clock, given another one's reading between two of it."""
    ahead_s = max(there - received, 0.0) + min(there - sent, 0.0)
    return [replace(one, began=one.began - ahead_s, ended=one.ended - ahead_s) for one in busy]


async def while_alive(actor: SpawnedActor, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, ending with `ActorDied` if an actor dies whose memory it may be reading.

    A read from a dead process may hang.
    """
    deaths = [] if actor.death is None else [actor.death]
    return await unless(work, deaths, lambda: ActorDied(*deaths[0].result().args))

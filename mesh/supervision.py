"""Supervision: errors of remote calls, and a `Supervisor` that reports failures by actor name.

    MeshError
    ├── ActorDied          the actor or its process is gone
    ├── DeadlineExceeded   neither answer nor progress in time; the actor may still be working
    ├── HostLost           the host can start nothing any more
    ├── ProcessLate        a process was not ready in time
    ├── SessionLost        the actor of a session is gone, and the session's state with it
    └── RemoteError        the endpoint raised something that could not be sent

An endpoint's own exception arrives unmodified, with a `RemoteError` as its cause. This module
starts, stops and restarts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, Future, MeshFailure

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.monarch_log import remove_opened
from composer_mesh.mesh.waiting import cancel_and_wait

remove_opened()  # a process that only imports Monarch leaves no log
T = TypeVar("T")
Late = Callable[[], Awaitable[float]]

STOPPED = "it was stopped"
"""Reason of a planned end, for callers that still wait for the actor."""
STOPPED_BY_US = "stopped by client"
"""What Monarch reports to those who wait for an actor that its process stops."""
INFRASTRUCTURE = "infrastructure"
"""Failure class of every death; `failures` has the others."""
CODE = "code"
"""Failure class of work that fails in every process."""


class Recorder(Protocol):
    """Records events about actors: `fields` is for programs, `detail` for people."""

    def __call__(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None: ...


class MeshError(RuntimeError):
    """Base of errors between processes; positional arguments, so that they can be pickled.

    A subclass that is a dataclass has them as its fields.
    """


@dataclass(eq=False, repr=False)
class ActorDied(Worded, MeshError):
    """An actor, or its process, is gone."""

    message = "{0} died: {1}"
    actor: str
    reason: str


class DeadlineExceeded(MeshError):
    """An endpoint neither answered nor made progress within its deadline.

    `last` says what its actor completed last, where it reports progress. `final` says that the
    deadline was doubled as often as it may be: no new process helps.
    """

    def __init__(
        self, actor: str, endpoint: str, seconds: float, last: str = "", final: bool = False
    ) -> None:
        super().__init__(actor, endpoint, seconds, last, final)
        self.actor = actor
        self.endpoint = endpoint
        self.seconds = seconds
        self.last = last
        self.failure_class = CODE if final else INFRASTRUCTURE

    def __str__(self) -> str:
        how = f"gave no answer within {self.seconds:g} s"
        if self.last:
            how = f"made no progress for {self.seconds:g} s ({self.last})"
        return (
            f"{self.actor}.{self.endpoint} {how}: raise run.deadline_s, or give the call less work"
        )


class HostLost(Worded, MeshError):
    """A host of the run is unreachable, and has ended its processes: its name and the reason."""

    message = "host {0} cannot be used: {1}"


@dataclass(eq=False, repr=False)
class ProcessLate(MeshError):
    """The process of an actor was not ready within Monarch's limit, which cannot be raised.

    `limit` is Monarch's text of it, `starts` how often the process was started.
    """

    actor: str
    host: str
    limit: str
    starts: int

    @property
    def why_repeated(self) -> str:
        """The detail of the event of a start that is repeated."""
        return f"its process was not ready within {self.limit}"

    def __str__(self) -> str:
        times = "once" if self.starts == 1 else f"{self.starts} times"
        return (
            f"{self.actor} was started {times} on {self.host}, but its process was never ready "
            f"within {self.limit}: start fewer processes at once there, or install the Python "
            "environment on a faster disk"
        )


@dataclass(eq=False, repr=False)
class SessionLost(Worded, MeshError):
    """A session's state was lost with its actor, `in_call` where it died under one of its calls."""

    message = (
        "session {0!r} was lost with {1}: {2}: begin it again in a new session, or open it with "
        "movable=True"
    )
    session: str
    replica: str
    reason: str
    in_call: bool = False


@dataclass(eq=False, repr=False)
class RemoteError(MeshError):
    """An endpoint failed; holds the text of its traceback."""

    actor: str
    endpoint: str
    text: str

    def __str__(self) -> str:
        return f"{self.actor}.{self.endpoint} failed:\n{self.text.rstrip()}"


async def call(
    reply: Future[T],
    deadline_s: float,
    actor: str,
    endpoint: str = "call",
    death: asyncio.Future[ActorDied] | None = None,
    late: Late | None = None,
) -> T:
    """Await the answer of an endpoint, at most `deadline_s`; raises the errors above.

    A deadline ends the wait, not the work at the other end. `death` ends the wait too: a message to
    a dead process may never be answered. `late` is called each time the deadline has passed, and
    returns for how many seconds more to wait, or raises `DeadlineExceeded`.
    """
    answer = reply.as_asyncio()
    answer.add_done_callback(heard)  # also if nothing awaits it any more
    either: list[asyncio.Future[Any]] = [answer] if death is None else [answer, death]
    try:
        await _first_of(either, deadline_s, late)
    except DeadlineExceeded:
        if not any(one.done() for one in either):
            raise
    finally:
        if not answer.done():
            answer.cancel()
    if answer.cancelled():
        if death is not None and death.done():
            raise ActorDied(death.result().actor, death.result().reason)
        raise DeadlineExceeded(actor, endpoint, deadline_s)
    try:
        return answer.result()
    except SupervisionError as error:
        raise ActorDied(actor, reason_of(str(error))) from None
    except ActorError as error:
        raise _original(error, actor, endpoint) from RemoteError(
            actor, endpoint, error.exception_formatted
        )
    except Exception as error:  # it could not be rebuilt in this process
        raise RemoteError(actor, endpoint, f"{type(error).__name__}: {error}") from error


async def _first_of(
    either: list[asyncio.Future[Any]], deadline_s: float, late: Late | None
) -> None:
    """Wait until one of some futures is done, or the deadline and what `late` adds has passed."""
    left_s = deadline_s
    while not any(one.done() for one in either):
        done, _ = await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if done or late is None:
            return
        left_s = await late()


def heard(answer: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not warn about it."""
    if not answer.cancelled():
        answer.exception()


def _original(error: ActorError, actor: str, endpoint: str) -> Exception:
    inner: BaseException = error
    while isinstance(inner, ActorError):
        inner = inner.exception
    if isinstance(inner, SupervisionError):
        return ActorDied(actor, reason_of(str(inner)))
    if isinstance(inner, Exception):
        return inner
    return RemoteError(actor, endpoint, error.exception_formatted)


def reason_of(report: str) -> str:
    """Extract the reason from Monarch's report, without the path to the actor.

    >>> reason_of("Endpoint call a.b() failed, The actor <root>.<A a> and all its descendants "
    ...           "have failed:\\n  the process failed: Killed(sig=9)")
    'the process failed: Killed(sig=9)'
    """
    for mark in ("failed:\n", "has status: ", "Supervision event: "):
        _, found, rest = report.partition(mark)
        if found:
            report = rest
            break
    if STOPPED_BY_US in report:
        return STOPPED
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    if any("Traceback" in line for line in lines):
        lines = lines[-1:]
    return " ".join(lines) or "no reason was reported"


class FaultPolicy(Enum):
    """Consequence of an actor's fault.

    ESCALATE ends the run. OWNER leaves it to the owner that spawned the actor, which is notified by
    its calls and by `SpawnedActor.death`.
    """

    ESCALATE = "escalate"
    OWNER = "owner"


@dataclass(frozen=True)
class Watched:
    """An actor known to a supervisor; `death` is done when it is dead."""

    actor: str
    policy: FaultPolicy
    death: asyncio.Future[ActorDied]
    fields: Mapping[str, Any] = field(default_factory=dict)


class Supervisor:
    """Receives every fault of this process's meshes, once each, under the actor's name.

    Monarch reports a fault on a thread of its own; everything else here runs on the loop that made
    the supervisor. `record(kind, actor, detail)` is called for each fault and each planned stop.
    `failure` is done at the first unplanned fault that ends the run.
    """

    def __init__(self, record: Recorder | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._record = record
        self._watched: dict[str, Watched] = {}
        self._expected: set[str] = set()
        self._seen: set[str] = set()
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        monarch.actor.unhandled_fault_hook = self._on_fault

    def watch(
        self,
        mesh_name: str,
        actor: str,
        policy: FaultPolicy = FaultPolicy.ESCALATE,
        /,
        **fields: Any,
    ) -> asyncio.Future[ActorDied]:
        """Register a Monarch mesh under our actor's name; return a future done at its death.

        `fields` are added to its events.
        """
        watched = Watched(actor, policy, self._loop.create_future(), fields)
        self._watched[mesh_name] = watched
        self._expected.discard(actor)
        return watched.death

    def expect_stop(self, actor: str) -> None:
        """Mark the actor's end as planned, from now on."""
        self._expected.add(actor)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` until it ends or an actor dies; then cancel it and raise `ActorDied`.

        An error passed to `fail` ends it too, and is raised.
        """
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self.failure]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done() and not _succeeded(task):
                raise self.failure.result()
            return task.result()
        except ActorDied as died:
            self.lost(died.actor, died.reason)  # a caller may notice it before Monarch reports it
            raise
        finally:
            await cancel_and_wait([task])

    def fail(self, error: BaseException) -> None:
        """End the guarded work with the error of something that it depends on."""
        if not self.failure.done():
            self.failure.set_result(error)

    def note(self, kind: str, actor: str, detail: str, /, **fields: Any) -> None:
        """Record an event about an actor, if there is a recorder."""
        if self._record is not None:
            self._record(kind, actor, detail, **fields)

    def lost(self, actor: str, reason: str) -> None:
        """Record a death that was noticed elsewhere; does nothing if it is already known."""
        names = [name for name, watched in self._watched.items() if watched.actor == actor]
        if names:
            self._handle(names[-1], reason)

    def _on_fault(self, failure: MeshFailure) -> None:
        """Called by Monarch, on its thread, possibly after the loop has closed."""
        mesh_name, report = failure.mesh_name, failure.report()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._handle, mesh_name, report)

    def _handle(self, mesh_name: str, report: str) -> None:
        watched = self._watched.get(mesh_name)
        if watched is None or mesh_name in self._seen:
            return  # the logger that Monarch runs next to each actor, or a repeated fault
        self._seen.add(mesh_name)
        died = ActorDied(watched.actor, reason_of(report))
        planned = died.actor in self._expected
        if not watched.death.done():  # its host may have stopped it
            watched.death.set_result(ActorDied(died.actor, STOPPED) if planned else died)
        about = {**watched.fields, "cause": died.reason, "class": INFRASTRUCTURE}
        fields = watched.fields if planned else about
        self.note("actor_stopped" if planned else "actor_died", died.actor, died.reason, **fields)
        if not planned and watched.policy is FaultPolicy.ESCALATE:
            self.fail(died)


def _succeeded(task: asyncio.Future[Any]) -> bool:
    return task.done() and not (task.cancelled() or task.exception())

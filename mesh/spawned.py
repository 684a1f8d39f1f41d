"""A running actor: how to call it, and how to work with it until it dies.

`spawn` starts and stops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import ProcMesh

from composer_mesh.mesh.activity import ActivityLog
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.deadlines import Deadlines, Patience
from composer_mesh.mesh.heartbeat import LastAnswer
from composer_mesh.mesh.hosts.host import Host
from composer_mesh.mesh.progress import Report
from composer_mesh.mesh.supervision import ActorDied, call
from composer_mesh.mesh.waiting import cancel_and_wait

T = TypeVar("T")

DESCRIBE = "describe"
"""The endpoint that answers immediately, even while the actor's work makes no progress."""
PROGRESS_S = 30.0
"""Longest wait for a report of progress; a silent actor counts as hung after as long by default."""


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
    actor_class: type[MeshActor]
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

    async def progress(self, deadline_s: float) -> Report | None:
        """Return the actor's progress; None where it does not answer or reports none."""
        try:
            return Report.of(await self.call(DESCRIBE, deadline_s=min(deadline_s, PROGRESS_S)))
        except Exception:  # noqa: BLE001  whatever its class raises there, it reports nothing
            return None


async def while_alive(actor: SpawnedActor, work: Coroutine[Any, Any, T], news_s: float = 0.0) -> T:
    """Run `work`, ending with `ActorDied` if an actor dies whose memory it may be reading.

    A read from a dead process may hang, or fail before the death is known: an error of the work is
    held back for `news_s`, to see whether such a death caused it.
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
    """Whether work has failed, other than by a known death."""
    failed = None if task.cancelled() else task.exception()
    return failed is not None and not isinstance(failed, ActorDied)

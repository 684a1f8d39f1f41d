"""The base class of every actor of a run, with its status report.

Independent of the kind of actor; needs no constructor.

Keeps garbage collections short and rare in processes that serve an event loop.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
import time
from functools import cache, partial
from typing import Any, ClassVar

from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import Actor, Port, concurrent_endpoint

from composer_mesh.mesh.call_server import Endpoint, Item
from composer_mesh.mesh.call_stream import StreamServer
from composer_mesh.mesh.heartbeat import ActivityLog, Busy
from composer_mesh.mesh.loop_watchdog import watch_this_loop
from composer_mesh.mesh.monarch_log import remove_opened
from composer_mesh.mesh.processes import resident_bytes
from composer_mesh.mesh.progress import PROGRESS

RARELY = (5_000, 20, 20)
"""Thresholds of the controller's collections: a full one after two million new containers.

It has no tensors that cyclic garbage could hold. By default a full one comes after 70,000, and with
the rollouts of thousands of episodes in memory each would take tenths of a second.
"""


@cache
def leave_out_loaded() -> None:
    """Leave the objects that exist now out of garbage collections; does so once in a process.

    What torch, transformers and Monarch create on import lives as long as the process. A full
    collection would visit all of it, and stop the event loop for tenths of a second each time.
    """
    gc.freeze()


def collect_rarely() -> None:
    """Make garbage collections of this process as rare as suits a controller."""
    gc.set_threshold(*RARELY)


remove_opened()  # a process that only imports Monarch leaves no log


class MeshActor(Actor):
    """An actor with a kind, an activity and, if it serves a policy, a policy version.

    Endpoints of a subclass are `async` and `concurrent_endpoint`; a long computation belongs into
    `asyncio.to_thread`, so that `describe` still answers. It reports each part that it completes
    by `progress.made_progress`: the deadlines of calls bound the time without progress.
    """

    kind: ClassVar[str] = "actor"
    activity: str = "idle"
    policy_version: int | None = None
    _streams: StreamServer | None = None
    _activity: ActivityLog | None = None

    @concurrent_endpoint
    async def describe(self) -> dict[str, Any]:
        """Return the actor's status. Answers immediately.

        It is the first call to every actor: from here on its event loop is watched.
        """
        watch_this_loop(self.kind)
        leave_out_loaded()
        return {
            "kind": self.kind,
            "pid": os.getpid(),
            "rss_bytes": resident_bytes(os.getpid()),
            "cpu_seconds": time.process_time(),
            "policy_version": self.policy_version,
            "activity": self.activity,
            "progress": PROGRESS.report(),
            "in_use": self.in_use(),
            **self.details(),
        }

    @concurrent_endpoint
    async def open_calls(
        self, caller: str, answers: Port[list[Item]], longest_wait_s: float
    ) -> Port[list[Item]]:
        """Return the port for the calls of a `CallStream`; they are answered to `answers`."""
        if self._streams is None:
            self._streams = StreamServer(self._observed_endpoint, end_this_process)
        return self._streams.open(caller, answers, longest_wait_s)

    @concurrent_endpoint
    async def take_activity(self) -> tuple[list[Busy], float]:
        """Return the busy intervals since the last request, and this host's time in s since 1970.

        They cover the calls of other actors, by stream. Answers immediately.
        """
        return self.activity_log.take(), time.time()

    @concurrent_endpoint
    async def close_calls(self, caller: str) -> None:
        """Drop everything of a caller that is dead. Waits until its calls have ended."""
        await self.end_calls(caller)

    async def end_calls(self, caller: str) -> None:
        """Cancel the calls of a caller's `CallStream`. Waits until they have ended."""
        if self._streams is not None:
            await self._streams.close_calls(caller)

    def in_use(self) -> int:
        """Return how many calls and sessions of others would be lost with this actor."""
        return 0 if self._streams is None else self._streams.running

    def details(self) -> dict[str, Any]:
        """Return a subclass's additions to `describe`: JSON-serializable values."""
        return {}

    @property
    def activity_log(self) -> ActivityLog:
        """The busy intervals that `take_activity` hands out; a subclass may add others."""
        if self._activity is None:
            self._activity = ActivityLog()
        return self._activity

    def _observed_endpoint(self, name: str) -> Endpoint:
        endpoint = own_endpoint(self, name)

        async def observed(*args: Any) -> Any:
            with self.activity_log.call("", name):
                return await endpoint(*args)

        return observed


def end_this_process(error: BaseException) -> None:
    """End at once, so that the owner learns of it and replaces this process."""
    sys.stderr.write(f"composer-mesh: calls can no longer be served: {error!r}\n")
    sys.stderr.flush()
    os._exit(1)


def own_endpoint(actor: MeshActor, name: str) -> Endpoint:
    """Return an actor's endpoint as the coroutine function that its class defines."""
    found = getattr(type(actor), name, None)
    if not isinstance(found, EndpointProperty):
        raise AttributeError(f"{type(actor).__name__} has no endpoint {name!r}")
    return partial(inspect.unwrap(found._method), actor)


def monarch_name(name: str) -> str:
    """Convert an actor's name for Monarch, which would drop the dot of `generator-0.2`."""
    return name.replace(".", "_")

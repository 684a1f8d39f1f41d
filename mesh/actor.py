"""The base class of every actor of a run, with its status report.

Independent of the kind of actor; needs no constructor.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from monarch.actor import Actor, concurrent_endpoint

from composer_mesh.mesh.loop_watchdog import watch_this_loop
from composer_mesh.mesh.monarch_log import remove_opened
from composer_mesh.mesh.processes import resident_bytes

remove_opened()  # a process that only imports Monarch leaves no log


class MeshActor(Actor):
    """An actor with a kind, an activity and, if it serves a policy, a policy version.

    Endpoints of a subclass are `async` and `concurrent_endpoint`; a long computation belongs into
    `asyncio.to_thread`, so that `describe` still answers.
    """

    kind: ClassVar[str] = "actor"
    activity: str = "idle"
    policy_version: int | None = None

    @concurrent_endpoint
    async def describe(self) -> dict[str, Any]:
        """Return the actor's status. Answers immediately.

        It is the first call to every actor: from here on its event loop is watched.
        """
        watch_this_loop(self.kind)
        return {
            "kind": self.kind,
            "pid": os.getpid(),
            "rss_bytes": resident_bytes(os.getpid()),
            "cpu_seconds": time.process_time(),
            "policy_version": self.policy_version,
            "activity": self.activity,
            **self.details(),
        }

    def details(self) -> dict[str, Any]:
        """Return a subclass's additions to `describe`: JSON-serializable values."""
        return {}


def monarch_name(name: str) -> str:
    """Convert an actor's name for Monarch, which would drop the dot of `generator-0.2`."""
    return name.replace(".", "_")

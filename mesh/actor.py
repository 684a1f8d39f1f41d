"""The base of every actor of a run: what it says about itself when asked.

It holds no behaviour of a kind of actor, and it needs no constructor of its own.
"""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

from monarch.actor import Actor, concurrent_endpoint

from composer_mesh.mesh.processes import resident_bytes


class MeshActor(Actor):
    """An actor with a kind, an activity and, where it serves a policy, a version of it.

    Endpoints of a subclass are `async` and `concurrent_endpoint`; a long computation belongs into
    `asyncio.to_thread`, so that `describe` answers meanwhile.
    """

    kind: ClassVar[str] = "actor"
    activity: str = "idle"
    policy_version: int | None = None

    @concurrent_endpoint
    async def describe(self) -> dict[str, Any]:
        """Say what this actor is and does. Answers at once."""
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
        """What a subclass adds to `describe`: plain values that JSON can hold."""
        return {}


def monarch_name(name: str) -> str:
    """The name of an actor as Monarch takes it: it would leave out the dot of `generator-0.2`."""
    return name.replace(".", "_")

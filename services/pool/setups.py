"""The set-up calls that each replica must receive before it serves: the last per endpoint.

`membership` makes the calls. A call that reads another actor's memory is stale once that actor is
gone: a replica that starts then waits for a newer one.
"""

from __future__ import annotations

import asyncio
from itertools import takewhile

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.pool.replicas import Call, Replica

LOAD = "load"
"""The set-up call that is slow and stays valid."""
TELL_S = 3.0
"""Longest time until an actor's death is known after a read of its memory has failed.

Such a read may fail immediately, and on a busy machine the notice of a process's end may be later.
"""


class Setups:
    """The set-up calls, in the order in which they were last made."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._remembered = asyncio.Event()

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._calls

    def remember(self, call: Call) -> None:
        """Store a call in place of the last one of its endpoint."""
        self._calls.pop(call.endpoint, None)
        self._calls[call.endpoint] = call
        self._remembered.set()

    def loads(self, replica: Replica) -> list[Call]:
        """Return the calls that a replica can receive while others are set up: they stay valid."""
        first = takewhile(lambda call: call.endpoint == LOAD, self._calls.values())
        return [call for call in first if replica.told.get(LOAD) is not call]

    def unsent_calls(self, replica: Replica) -> list[Call]:
        """Return the calls that a replica has not received yet."""
        return [
            call for call in self._calls.values() if replica.told.get(call.endpoint) is not call
        ]

    async def readable(self, deadline_s: float) -> None:
        """Wait until no call is stale; after `deadline_s` raise the death of its source."""
        try:
            async with asyncio.timeout(deadline_s):
                while any(call.stale for call in self._calls.values()):
                    self._remembered.clear()
                    await self._remembered.wait()
        except TimeoutError:
            raise self._end_of_source() from None

    def _end_of_source(self) -> ActorDied:
        sources = (call.source for call in self._calls.values() if call.stale)
        name = next((source.name for source in sources if source), "its source")
        return ActorDied(name, "nothing took the place of what it had published")


async def source_ended(call: Call) -> ActorDied | None:
    """Return the death of the actor that a failed call read from, if it explains the failure."""
    if call.source is None or call.source.death is None:
        return None
    await asyncio.wait([call.source.death], timeout=TELL_S)
    return ActorDied(*call.source.death.result().args) if call.stale else None

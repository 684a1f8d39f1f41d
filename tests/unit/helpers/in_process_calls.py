"""Calls to actors in the test's own process: `mesh.call_stream.Calls` without a channel.

Arguments and answers are pickled as between processes.
"""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections.abc import Callable
from typing import Any

from composer_mesh.actors.rollout_workers.peers import Peer, Peers
from composer_mesh.mesh.actor import MeshActor, own_endpoint
from composer_mesh.mesh.call_server import current_caller
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import cancel_and_wait


class InProcessCalls:
    """The port `Calls` of one caller; `target` is an actor, or has coroutine methods as its
    endpoints."""

    def __init__(self, caller: str, target: Any) -> None:
        self.caller, self.target = caller, target
        self.load = 0
        self._died: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()

    async def call(self, endpoint: str, /, *args: Any) -> Any:
        self._check()
        context = contextvars.copy_context()
        context.run(current_caller.set, self.caller)
        work = self._endpoint(endpoint)(*pickle.loads(pickle.dumps(args)))
        task = asyncio.get_running_loop().create_task(work, context=context)
        either: list[asyncio.Future[Any]] = [task, self._died]
        self.load += 1
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            self._check()
            return pickle.loads(pickle.dumps(task.result()))
        finally:
            self.load -= 1
            await cancel_and_wait([task])

    def lose(self, died: ActorDied) -> None:
        if not self._died.done():
            self._died.set_result(died)

    async def close(self) -> None:
        self.lose(ActorDied(self.caller, "the connection to it was closed"))

    def _check(self) -> None:
        if self._died.done():
            died = self._died.result()
            raise type(died)(*died.args)

    def _endpoint(self, name: str) -> Callable[..., Any]:
        if isinstance(self.target, MeshActor):
            return own_endpoint(self.target, name)
        found: Callable[..., Any] = getattr(self.target, name)
        return found


def open_in_process(caller: str) -> Callable[[str, Any], InProcessCalls]:
    """Open streams of one caller: the reference of a peer is its target itself."""
    return lambda _, target: InProcessCalls(caller, target)


def peers(targets: dict[str, Any], caller: str = "rollouts-0") -> Peers:
    """Return the connections of a worker to these actors, all of them open."""
    made = Peers(open_in_process(caller))
    update(made, targets)
    return made


def update(made: Peers, targets: dict[str, Any], gone: str = "killed") -> None:
    """Name the actors that are left."""
    left = tuple(Peer(name, target) for name, target in targets.items())
    made.update(left, dict.fromkeys(set(made.open) - set(targets), gone))

"""A host that runs real actors in the test's own process, so that ports over them need no mesh.

Messages are pickled as between processes. An actor's own exception arrives with a `RemoteError` as
its cause, and a call under way ends with the death of its actor, as `mesh.supervision` says.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Coroutine
from itertools import count
from typing import Any, cast

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import STOPPED, ActorDied, RemoteError
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.services import service
from composer_mesh.services.service import Service


class InProcessActor:
    """An actor object behind the interface of `SpawnedActor`."""

    def __init__(self, name: str, pid: int, actor: MeshActor, loading: asyncio.Lock) -> None:
        self.name, self.pid, self.actor, self._loading = name, pid, actor, loading
        self.death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self.death.done()

    def die(self, reason: str = "killed") -> None:
        if self.alive:
            self.death.set_result(ActorDied(self.name, reason))

    async def call(self, endpoint: str, *args: Any, deadline_s: float = 0, **kwargs: Any) -> Any:
        work = inspect.unwrap(getattr(type(self.actor), endpoint)._method)
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        running = work(self.actor, *args, **kwargs)
        task = asyncio.ensure_future(self._alone(running) if endpoint == "load" else running)
        either: list[asyncio.Future[Any]] = [task, self.death]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.death.done():
                raise ActorDied(*self.death.result().args)
            return pickle.loads(pickle.dumps(task.result()))
        except ActorDied:
            raise
        except Exception as error:
            raise error from RemoteError(self.name, endpoint, "its traceback")
        finally:
            await cancel_and_wait([task])

    async def _alone(self, load: Coroutine[Any, Any, Any]) -> Any:
        async with self._loading:  # transformers cannot load two models in one process at once
            return await load


class InProcessHost:
    """Starts actors here."""

    name = "localhost"
    capacity_wait_s = 0.0
    supervisor = None

    def __init__(self) -> None:
        self.actors: dict[str, InProcessActor] = {}
        self._pids, self._loading = count(100), asyncio.Lock()

    async def spawn(self, name: str, kind: type[MeshActor], *args: Any, **_: Any) -> InProcessActor:
        self.actors[name] = InProcessActor(name, next(self._pids), kind(*args), self._loading)
        return self.actors[name]

    async def stop(self, actor: InProcessActor) -> None:
        actor.die(STOPPED)

    def lost(self, actor: InProcessActor, reason: str) -> None:
        actor.die(reason)

    async def serve(self, kind: type[MeshActor], n: int = 1, **options: Any) -> Service:
        """A service of real actors on this host, named after their kind."""
        host = cast(MeshHost, self)
        return await service.spawn(kind, n=n, host=host, name=kind.kind, **options)

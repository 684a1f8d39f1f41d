"""A host without processes: its actors hold each call until the test answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, HostLost
from composer_mesh.services import service
from composer_mesh.services.service import Service

Answer = Callable[[str, tuple[Any, ...]], Any]


class Worker(MeshActor):
    """Only its endpoints' names matter."""

    @concurrent_endpoint
    async def work(self, *args: Any) -> Any: ...

    @concurrent_endpoint
    async def load(self, *args: Any) -> Any: ...

    @concurrent_endpoint
    async def pull(self, *args: Any) -> Any: ...

    @concurrent_endpoint
    async def set_awake(self, *args: Any) -> Any: ...

    @concurrent_endpoint
    async def status(self) -> Any: ...


@dataclass
class FakeCall:
    """A call that an actor has."""

    endpoint: str
    args: tuple[Any, ...]
    deadline_s: float
    answer: asyncio.Future[Any]

    def give(self, value: Any = None) -> None:
        self.answer.set_result(value)

    def fail(self, error: Exception) -> None:
        self.answer.set_exception(error)

    def run_out(self) -> None:
        self.fail(DeadlineExceeded("worker", self.endpoint, self.deadline_s))


@dataclass(eq=False)
class FakeActor:
    """`held` are its calls without an answer; what is no `work` it answers itself."""

    name: str
    pid: int
    policy: Any
    death: asyncio.Future[ActorDied]
    held: list[FakeCall] = field(default_factory=list)
    heard: list[tuple[Any, ...]] = field(default_factory=list)
    broken: Exception | None = None
    slow: asyncio.Event | None = None
    host: FakeHost | None = field(default=None, repr=False)
    stopped: bool = False
    in_use: int = 0
    """What it says of the calls and sessions that others have there."""
    describe_error: Exception | None = None
    on: str | None = None
    env: Mapping[str, str] | None = None

    async def call(self, endpoint: str, *args: Any, deadline_s: float) -> Any:
        if self.death.done():
            raise ActorDied(*self.death.result().args)
        if endpoint == "describe" and self.describe_error is not None:
            raise self.describe_error
        if endpoint == "describe" and self.answer is None:
            return {"in_use": self.in_use}
        self.heard.append((endpoint, *args))
        if endpoint != "work":
            if self.slow is not None:
                await self.slow.wait()
            if self.broken is not None:
                raise self.broken
            return self.name if self.answer is None else self.answer(endpoint, args)
        loop = asyncio.get_running_loop()
        call = FakeCall(endpoint, args, deadline_s, loop.create_future())
        self.held.append(call)
        try:
            return await call.answer
        finally:
            self.held.remove(call)

    @property
    def answer(self) -> Answer | None:
        return None if self.host is None else self.host.answer

    @property
    def alive(self) -> bool:
        return not self.death.done()

    def die(self, reason: str = "killed") -> None:
        """Its process is gone: everybody who waits for it hears so, then the supervisor."""
        for call in self.held:
            call.fail(ActorDied(self.name, reason))
        self.death.set_result(ActorDied(self.name, reason))

    def finish(self, value: Any = None) -> None:
        """Answer the call that it has had longest."""
        self.held[0].give(value or self.name)


class FakeHost:
    """Starts fakes; `gate` holds every start back.

    What it starts is `broken` or `slow` in all but `work`, and says its name or the `answer`.
    """

    name = "localhost"
    capacity_wait_s = 0.0

    def __init__(self) -> None:
        self.supervisor = None
        self.started: list[FakeActor] = []
        self.told: list[tuple[str, str]] = []
        self.gate: asyncio.Event | None = None
        self.broken: Exception | None = None
        self.slow: asyncio.Event | None = None
        self.answer: Answer | None = None
        self.lost_hosts: set[str] = set()
        self._pids = count(100)

    async def spawn(
        self,
        name: str,
        kind: Any,
        *args: Any,
        policy: Any,
        on: str | None = None,
        env: Mapping[str, str] | None = None,
        **_: Any,
    ) -> FakeActor:
        assert name not in self.running, f"{name} is used twice"
        if self.gate is not None:
            await self.gate.wait()
        if on in self.lost_hosts:
            raise HostLost(str(on), "it is gone")
        death: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
        actor = FakeActor(name, next(self._pids), policy, death)
        actor.broken, actor.slow, actor.host = self.broken, self.slow, self
        actor.on, actor.env = on, env
        self.started.append(actor)
        return actor

    async def stop(self, actor: FakeActor) -> None:
        actor.stopped = True
        if not actor.death.done():
            actor.death.set_result(ActorDied(actor.name, "stopped by client"))

    def lost(self, actor: FakeActor, reason: str) -> None:
        self.told.append((actor.name, reason))
        if not actor.death.done():
            actor.die(reason)

    async def started_as(self, name: str) -> FakeActor:
        """Wait for a process of this name."""
        await until(lambda: name in {actor.name for actor in self.started})
        return self[name]

    @property
    def running(self) -> list[str]:
        return [actor.name for actor in self.started if not actor.stopped]

    def __getitem__(self, name: str) -> FakeActor:
        return next(actor for actor in self.started if actor.name == name)


async def serve(host: FakeHost, n: int = 2, **options: Any) -> Service:
    """A service of workers on a fake host."""
    return await service.spawn(Worker, n=n, host=cast(MeshHost, host), name="w", **options)


async def turns() -> None:
    """Let all happen that can: nothing here waits for a clock, only for turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    """Let things happen until a condition holds."""
    for _ in range(1_000_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def ask(pool: Any, *args: Any) -> asyncio.Task[Any]:
    """A call of `work` beside the test."""
    return asyncio.ensure_future(pool.work(*args))

"""Connecting rollout workers: a worker plays nothing before it was told whom to call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.services.episodes.workers import RolloutPools, RolloutWorkers
from composer_mesh.services.service import Service

BOUND_S = 30.0


@dataclass
class Member:
    """A replica that serves."""

    name: str
    serving: bool = True
    open: bool = True

    @property
    def actor(self) -> Member:
        return self

    @property
    def ref(self) -> str:
        return self.name


@dataclass
class Pool:
    """A pool whose members change only when one is lost."""

    replicas: list[Member]
    hopeful: bool = True
    changed: list[Callable[[], None]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def lose(self, name: str, reason: str) -> None:
        self.lost.append(f"{name}: {reason}")
        self.replicas = [one for one in self.replicas if one.name != name]
        for changed in self.changed:
            changed()

    def reason(self, name: str) -> str:
        return f"{name} is gone"

    async def fanout(self, *_: Any) -> list[Any]:
        return []

    def members(self) -> list[Member]:
        return self.replicas

    def on_change(self, changed: Callable[[], None]) -> None:
        self.changed.append(changed)


@dataclass
class Worker:
    """A worker whose `connect` raises these errors first; it plays by returning its name."""

    name: str
    errors: list[Exception] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    load: int = 0

    async def call(self, endpoint: str, /, *_: Any) -> Any:
        self.called.append(endpoint)
        if endpoint == "connect" and self.errors:
            raise self.errors.pop(0)
        return self.name

    def lose(self, died: ActorDied) -> None: ...

    async def close(self) -> None: ...


Events = asyncio.Queue[str]


def workers_of(events: Events, *workers: Worker) -> RolloutWorkers:
    return pool_and_workers(events, *workers)[1]


def pool_and_workers(events: Events, *workers: Worker) -> tuple[Pool, RolloutWorkers]:
    by_name = {one.name: one for one in workers}
    mine = Pool([Member(name) for name in by_name])
    others = [Pool([Member("generator-0")]), Pool([Member("environment-0")])]
    pools = RolloutPools(*(cast(Service, pool) for pool in (mine, *others)))

    def record(kind: str, _: str, detail: str, /, **__: Any) -> None:
        events.put_nowait(f"{kind} {detail}")

    made = RolloutWorkers(
        pools,
        record,
        lockstep=False,
        open_stream=lambda name, _: by_name[name],
    )
    return mine, made


def sample() -> Sample:
    return Sample(Episode("toolbox", "train", 0, {}), 0, 0, Sampling(1.0, 8, 64, 0))


async def test_a_worker_whose_connection_failed_once_is_connected_again_before_it_plays() -> None:
    events = Events()
    worker = Worker("rollouts-0", [RuntimeError("no")])
    workers = workers_of(events, worker)
    async with asyncio.timeout(BOUND_S):
        assert cast(str, await workers.play(sample(), "one")) == "rollouts-0"
    assert worker.called == ["connect", "connect", "play"]
    assert events.empty()
    await workers.close()


async def test_a_worker_that_cannot_be_connected_is_replaced_and_plays_nothing() -> None:
    errors: list[Exception] = [RuntimeError("no"), RuntimeError("never")]
    broken, good = Worker("rollouts-0", errors), Worker("rollouts-1")
    pool, workers = pool_and_workers(Events(), broken, good)
    async with asyncio.timeout(BOUND_S):
        assert cast(str, await workers.play(sample(), "one")) == "rollouts-1"
    assert "play" not in broken.called
    assert pool.lost == ["rollouts-0: its connect failed: RuntimeError: never"]
    await workers.close()

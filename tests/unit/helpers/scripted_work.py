"""Actors whose work and reports of progress a test scripts, behind `SpawnedActor`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.mesh.hosts.host import LocalHost
from composer_mesh.mesh.progress import ProgressReport
from composer_mesh.mesh.spawned import Deadlines, SpawnedActor

NOW_S = 1e-9
"""A deadline that has passed as soon as anybody looks."""


class Work:
    """An answer that the test gives, as Monarch's future."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def as_asyncio(self) -> asyncio.Future[Any]:
        return self.answer


@dataclass
class Endpoint:
    """An endpoint, whose calls are answered by a function."""

    answer: Any

    def call_one(self, *_: Any) -> Work:
        work = Work()
        self.answer(work.answer)
        return work


@dataclass
class Worker:
    """What `SpawnedActor.ref` has: work that never ends, and a report for each question.

    The reports are used up one by one; after the last one the work ends.
    """

    reports: list[ProgressReport]
    result: Any = "done"
    asked: int = 0
    working: list[asyncio.Future[Any]] = field(default_factory=list)

    @property
    def train(self) -> Endpoint:
        return Endpoint(self.working.append)

    publish = save = train

    @property
    def describe(self) -> Endpoint:
        return Endpoint(self._describe)

    def _describe(self, answer: asyncio.Future[Any]) -> None:
        self.asked += 1
        if len(self.reports) == 1:
            for work in self.working:
                if not work.done():
                    work.set_result(self.result)
        report = self.reports.pop(0) if self.reports else ProgressReport()
        answer.set_result({"progress": report.__dict__})


class Silent(Worker):
    """A worker whose loop stands still."""

    @property
    def describe(self) -> Endpoint:
        return Endpoint(lambda _: None)


class Broken(Worker):
    """A worker whose class cannot say how it is."""

    @property
    def describe(self) -> Endpoint:
        return Endpoint(lambda answer: answer.set_exception(KeyError("models")))


def actor(worker: Worker, deadlines: Deadlines | None = None, name: str = "trainer") -> Any:
    given = {"deadlines": deadlines or Deadlines()}
    procs: Any = None
    return SpawnedActor(name, "trainer", worker, 7, procs, LocalHost(), **given)


def stands_still(age_s: float = 1.0) -> ProgressReport:
    return ProgressReport(3, "microbatch 3 of 8 of step 5", age_s)


def moves() -> ProgressReport:
    return ProgressReport(4, "microbatch 4 of 8 of step 5", 0.0)

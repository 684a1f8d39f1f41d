"""A pool whose members a test changes, as those that follow a service see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.services.pool.dispatch import NoReplicaLeft


@dataclass
class Member:
    """A replica whose state a test sets; `answers` are those of its endpoints, or raised."""

    name: str
    serving: bool = True
    open: bool = True
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    @property
    def actor(self) -> Member:
        return self

    @property
    def ref(self) -> str:
        return self.name

    async def call(self, *call: Any) -> Any:
        self.calls.append(call)
        answer = self.answers.get(call[0])
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class Pool:
    """A pool whose members a test changes; `asked` are the calls of all members."""

    replicas: list[Member]
    can_serve: bool = True
    changed: list[Callable[[], None]] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def members(self) -> list[Member]:
        return self.replicas

    def on_change(self, changed: Callable[[], None]) -> None:
        self.changed.append(changed)

    def change(self, *names: str, draining: tuple[str, ...] = ()) -> None:
        self.replicas = [Member(name, open=name not in draining) for name in names]
        self.tell()

    def give_up(self) -> None:
        self.replicas, self.can_serve = [], False
        self.tell()

    def tell(self) -> None:
        for changed in self.changed:
            changed()

    def lose(self, name: str, reason: str) -> None:
        self.lost.append(f"{name}: {reason}")
        self.change(*(one.name for one in self.replicas if one.name != name))

    def reason(self, name: str) -> str:
        return f"{name} was killed"

    def last_death(self) -> NoReplicaLeft:
        return NoReplicaLeft("generator-0", "given up")

    async def fanout(self, *asked: Any) -> list[Any]:
        self.asked.append(asked)
        return []

"""Resizes the pools of a running run: which kinds are scalable, and within which bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from composer_mesh.services.directory.control import ControlRefused

SCALABLE = ("generator", "environment", "rollouts", "teacher_replay")
FIXED = {
    "trainer": "its ranks share every step's samples: set trainer.ranks before a run",
    "sdpo_teacher": "a step's signals are divided among them before it begins: set sdpo.replicas "
    "before a run",
    "reference": "a run has one of it",
    "hint_writer": "a run has one of it",
    "expert_server": "a run has one of it",
    "controller": "a run has one of it",
}
PER_CORE, FEW_CORES = 4, 16


class Pool(Protocol):
    """Resizable replicas of one kind."""

    def __len__(self) -> int: ...

    async def resize(self, n: int) -> None: ...


class Scaling:
    """Resizes the pools of one run and records each change."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        record: Callable[[str, str, str], None],
        largest: int | None = None,
        cores: int | None = None,
    ) -> None:
        """`cores` are those of all hosts, by default of this machine; they bound a pool's size."""
        self._pools, self._record = pools, record
        self._largest = largest or max(FEW_CORES, PER_CORE * (cores or os.cpu_count() or 1))

    async def scale(self, **wanted: Any) -> dict[str, dict[str, int]]:
        """Resize pools to the given replica counts; return the counts before and after.

        Refuses the complete request if one part is invalid. Waits until new replicas serve and old
        ones have ended.
        """
        if not wanted:
            raise ControlRefused("no pool was named: say for example generator=3")
        for kind, count in wanted.items():
            self._check(kind, count)
        changing = (self._resize(kind, count) for kind, count in wanted.items())
        changes = await asyncio.gather(*changing, return_exceptions=True)  # independent
        if failed := [change for change in changes if isinstance(change, BaseException)]:
            raise failed[0]
        return {
            kind: change
            for kind, change in zip(wanted, changes, strict=True)
            if not isinstance(change, BaseException)
        }

    def _check(self, kind: str, count: Any) -> None:
        if kind in FIXED:
            raise ControlRefused(f"{kind} does not scale while a run goes on: {FIXED[kind]}")
        scalable = [name for name in SCALABLE if name in self._pools]
        if kind not in scalable:
            raise ControlRefused(
                f"{kind!r} is no pool of this run: name one of {', '.join(scalable)}"
            )
        if type(count) is not int or not 1 <= count <= self._largest:
            raise ControlRefused(
                f"{kind} is {count!r} but must be a whole number from 1 to {self._largest}, "
                f"{PER_CORE} processes for each core of this machine and {FEW_CORES} at least"
            )

    async def _resize(self, kind: str, count: int) -> dict[str, int]:
        pool = self._pools[kind]
        before = len(pool)
        try:
            await pool.resize(count)
        except Exception as error:
            self._record("pool_not_resized", kind, f"{before} to {count}: {error}")
            raise
        self._record("pool_resized", kind, f"{before} to {len(pool)}")
        return {"before": before, "after": len(pool)}

"""A run's store in memory, which keeps the contract of `RunStore` and fails where told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tasks import PoisonedInput
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.steps.step_manifest import manifest_from_json

Done = tuple[str, Any]


class Broken(Exception):
    """What a port raises in these tests."""


@dataclass
class FakeStore:
    """Writes down in `done` what it stores, in order; the port `broken` raises."""

    broken: str = field(default="", kw_only=True)
    done: list[Done] = field(default_factory=list, kw_only=True)
    groups: dict[int, list[Trace]] = field(default_factory=dict, kw_only=True)
    """The stored groups."""
    taken: set[int] = field(default_factory=set, kw_only=True)
    """The groups that a step has taken."""
    told: set[str] = field(default_factory=set, kw_only=True)
    """The pairs that were ever stored."""
    pairs: list[PreferencePair] = field(default_factory=list, kw_only=True)
    """Those that wait for a step."""

    def names(self, kind: str) -> list[Any]:
        return [what for done, what in self.done if done == kind]

    async def written(self, port: str) -> None:
        """One turn of the loop for a disk, and its fate."""
        await asyncio.sleep(0)
        if port == self.broken:
            raise Broken(port)

    def enter(self, group_id: int, version: int) -> None:
        self.done.append(("entered", group_id))

    async def add_group(self, group_id: int, traces: Sequence[Trace]) -> list[Trace]:
        await self.written("add_group")
        if group_id not in self.groups:
            self.groups[group_id] = list(traces)
            self.done += [("stored", trace) for trace in traces]
        return list(self.groups[group_id])

    async def add_worded(self, group_id: int, worded: bytes) -> None:
        self.done.append(("worded", group_id))

    async def add_teacher_queries(
        self, group_id: int, body: bytes, pairs: Sequence[PreferencePair]
    ) -> list[PreferencePair]:
        await self.written("add_teacher_queries")
        fresh = [pair for pair in pairs if pair.pair_id not in self.told]
        self.told |= {pair.pair_id for pair in fresh}
        self.done += [("pair", pair) for pair in fresh]
        self.pairs += fresh
        return fresh

    async def take_pairs(
        self, step: int, max_age: int, limit: int
    ) -> tuple[list[PreferencePair], int]:
        young = [pair for pair in self.pairs if step - pair.rejected_version <= max_age]
        return young[:limit], len(self.pairs) - len(young)

    def waiting_pairs(self) -> int:
        return len(self.pairs)

    async def plan_step(
        self,
        step: int,
        groups: Sequence[int],
        manifest: bytes,
        pairs: Sequence[str] = (),
        max_age: int | None = None,
        rewards: Mapping[int, str] | None = None,
    ) -> None:
        await self.written("plan_step")
        if wrong := [one for one in groups if one in self.taken or one not in self.groups]:
            raise ValueError(f"groups {wrong} are not finished, so step {step} cannot train it")
        self.taken |= set(groups)
        self.done.append(("planned", manifest_from_json(step, manifest)))
        self.pairs = [
            pair
            for pair in self.pairs
            if pair.pair_id not in pairs and step - pair.rejected_version <= (max_age or 0)
        ]

    async def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        await self.written("end_step")
        self.done.append(("metrics", dict(metrics)))

    def waits(self) -> dict[str, float]:
        return {}

    def add_evaluation(self, evaluation: Evaluation) -> None:
        self.done.append(("measured", evaluation.step))

    def add_event(self, kind: str, actor: str = "", detail: str = "") -> None:
        self.done.append((kind, (actor, detail)))

    def add_poisoned(self, poisoned: PoisonedInput) -> None:
        self.done.append(("poisoned", poisoned))

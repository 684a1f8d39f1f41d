"""A trainer's ranks that take their time, so that a sync is under way beside a step, and die then.

The arithmetic is that of `fake_trainer`. A rank's update waits for the copy of a version that is
held, a sync brings the version to the teachers first, and a death ends whatever needs the ranks.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import fake_trainer

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.controller import AsyncWeightSync
from composer_mesh.services.steps.ports import MayTrain


class SlowWorld(fake_trainer.World):
    """Every part of a step and of a sync takes some turns of the loop, by chance."""

    def __init__(self, seed: int, longest: int = 6) -> None:
        super().__init__()
        self.rng, self.longest = random.Random(seed), longest
        self.teaches = seed % 2 == 0
        """Whether a step waits for teachers in processes of their own."""
        self.free = asyncio.Event()
        self.free.set()
        self.gate: asyncio.Event | None = None
        """What receivers wait for, once the next step may be trained."""
        self.foreign: ActorDied | None = None
        """Who else dies in the next sync."""
        self.training = self.syncing = self.kills = 0
        self.beside = 0
        """Updates that came while a sync was under way."""
        self.struck: list[tuple[bool, bool]] = []
        """For each death whether a step, and whether a sync, was under way."""

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(self.longest)):
            await asyncio.sleep(0)

    def strike(self) -> None:
        """A rank dies, if all live."""
        if self.dead is None:
            self.kills += 1
            self.struck.append((self.training > 0, self.syncing > 0))
            self.kill(ActorDied(self.names()[0], "killed by signal 9"))

    async def restart_from(self, checkpoint: Path | None) -> int:
        assert (self.training, self.syncing) == (0, 0)
        await self.pause()
        self.free.set()
        return await super().restart_from(checkpoint)

    async def train(self, batch: StepBatch, teacher_outputs: bool | None = None) -> dict[str, Any]:
        self.training += 1
        assert self.training == 1
        try:
            await self.pause()
            await self.free.wait()
            self.beside += self.syncing
            return await super().train(batch, teacher_outputs)
        finally:
            self.training -= 1

    async def saved(self) -> list[WrittenFile]:
        await self.pause()
        return await super().saved()

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        self._try("sync")
        self.syncing += 1
        assert self.syncing == 1
        try:
            version, weight = await self._published(None if self.teaches else on_snapshot)
            await self.pause()
            self.teach(version, weight)
            if self.teaches and on_snapshot is not None:
                on_snapshot()
            await self._received()
            self.served.append((version, weight))
        finally:
            self.syncing -= 1
        return version

    async def _received(self) -> None:
        await self.pause()
        if self.gate is not None:
            await self.gate.wait()
        if self.foreign is not None:
            raise self.foreign

    async def _published(self, on_snapshot: MayTrain | None) -> tuple[int, float]:
        assert not self.training, "a version is held only between two steps"
        version = self.version
        self.free.clear()
        if on_snapshot is not None:
            self.teach(version, self.weight)
            on_snapshot()
        await self.pause()
        weight = self.weight
        assert self.version == version, "an update came before the copy"
        self.free.set()
        return version, weight


class Beside(fake_trainer.Running):
    """A run's trainer on slow fakes, driven as the controller drives it where rollouts may lag."""

    def __init__(self, build_config: Any, root: Path, seed: int, **sections: Any) -> None:
        super().__init__(build_config, root, **sections)
        self.slow = self.world = SlowWorld(seed)
        self.trainer = self.made(None)
        self.versions: list[int] = []
        self.syncs = AsyncWeightSync(self.trainer, self.versions.append)

    async def run(self, steps: int) -> None:
        """Train and serve so many steps; a rank that dies meanwhile is the trainer's business."""
        await self.trainer.during(self.syncs.guard(self._loop(steps)))

    async def _loop(self, steps: int) -> None:
        every = self.config.trainer.checkpoint_every
        for step in range(steps):
            await self.slow.pause()
            await self.syncs.on_snapshot()
            await self.trainer.train(fake_trainer.batch(step))
            if every and (step + 1) % every == 0:
                self.versions.append(await self.syncs.now())
                await self.trainer.save(step + 1)
            else:
                await self.syncs.begin()
        await self.syncs.finish()
        await self.trainer.saved()

    async def run_and_strike(self, steps: int, optimizer_state: list[int]) -> None:
        """Let a rank die after each of so many turns, counted from the death before."""
        running = asyncio.create_task(self.run(steps))
        try:
            for turns in optimizer_state:
                for _ in range(turns):
                    await asyncio.sleep(0)
                if not running.done():
                    self.slow.strike()
            await running
        finally:
            await cancel_and_wait([running])

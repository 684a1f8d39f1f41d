"""A trainer's ranks, teachers and weight sync that fail when told, and a run that drives them.

They train by arithmetic: a weight is a number that depends on every batch so far and on what
teachers had to say about it, so equal weights mean equal training. So is a moving average.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import hinted

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.actors.checkpoints.manifest import WrittenFile, written
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.services.steps.logprob_mismatch import Trained
from composer_mesh.services.steps.ports import MayTrain
from composer_mesh.services.training.checkpoint_writes import AverageLost
from composer_mesh.services.training.fault_tolerant_trainer import FaultTolerantTrainer

T = TypeVar("T")
Log = list[tuple[Any, ...]]
STATE_FILE, AVERAGE_FILE = "state", "average"
RATE = 0.25


@dataclass
class World:
    """Ranks, steps, teachers and a weight sync; `fails` are the errors of the next tries of each.

    A fake that fails with a death leaves the ranks dead until they begin again.
    """

    log: Log = field(default_factory=list)
    fails: dict[str, list[Exception | None]] = field(default_factory=dict)
    events: list[tuple[str, ...]] = field(default_factory=list)
    weight: float = 0.0
    version: int = 0
    taught_version: int = 0
    average: float | None = None
    """What teachers with a moving average have; None for others."""
    copied: tuple[Path, str] = (Path(), "")
    kept: str = ""
    disk: asyncio.Event | None = None
    """What a write waits for."""
    exported: list[bool] = field(default_factory=list)
    served: list[tuple[int, float]] = field(default_factory=list)
    generation: int = 1
    dead: ActorDied | None = None
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def _try(self, what: str) -> None:
        error = next(iter(self.fails.get(what, [])), None)
        if self.fails.get(what):
            self.fails[what].pop(0)
        if error is not None:
            self.dead = error if isinstance(error, ActorDied) else None
            raise error

    # --- ranks

    def names(self) -> list[str]:
        return ["trainer" + (f".{self.generation}" if self.generation > 1 else "")]

    async def save(self, draft: Path, export: bool) -> None:
        self._try("save")
        self.copied = draft, f"{self.version} {self.weight!r}"
        self.exported.append(export)

    async def saved(self) -> list[WrittenFile]:
        if self.disk is not None:
            await self.disk.wait()
        self._try("saved")
        draft, state = self.copied
        (draft / STATE_FILE).write_text(state)
        self.log.append(("save", int(state.split()[0])))
        return written(draft, [draft / STATE_FILE])

    async def restart_from(self, checkpoint: Path | None) -> int:
        self.generation += 1
        self.dead = None
        try:
            self._try("begin")
        except Exception:
            self.dead = None  # none was started, so none is dead
            raise
        self.version, self.weight = 0, 0.0
        if checkpoint is not None:
            version, weight = (checkpoint / STATE_FILE).read_text().split()
            self.version, self.weight = int(version), float(weight)
        self.log.append(("begin", self.version))
        return self.version

    async def until_one_dies(self) -> None:
        while self.dead is None:
            self.stirred.clear()
            await self.stirred.wait()

    def died(self) -> ActorDied | None:
        return self.dead

    def kill(self, died: ActorDied) -> None:
        self.dead = died
        self.stirred.set()

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        if self.dead is not None:
            work.close()
            raise self.dead
        task, dying = asyncio.ensure_future(work), asyncio.ensure_future(self.until_one_dies())
        try:
            await asyncio.wait([task, dying], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.dead is not None:
                raise self.dead
            return await task
        finally:
            await cancel_and_wait([task, dying])

    async def cause_of(self, error: Exception) -> Exception:
        if isinstance(error, ActorDied) and error.actor in self.names() and self.dead is None:
            self.kill(error)
        return self.dead or error

    # --- a step, teachers, weights

    async def train(self, batch: StepBatch, teacher_outputs: bool | None = None) -> dict[str, Any]:
        self._try("train")
        batch.check_trains(self.version)
        taught = teacher_outputs is not False and bool(batch.views)
        if taught:
            assert self.taught_version == self.version
        said = 0.25 if self.average is None else self.average
        self.version += 1
        self.weight = self.weight * 0.5 + batch.step + (said if taught else 0.0)
        self.log.append(("train", batch.step, teacher_outputs))
        lost = {} if taught or not batch.views else {"sdpo/lost_steps": 1}
        return {"loss/total": self.weight, **lost}

    async def forget(self) -> None:
        self.log.append(("forget",))

    async def follow(self) -> None:
        self.teach(self.version, self.weight)
        self.log.append(("follow", self.version))

    def teach(self, version: int, weight: float) -> None:
        """Let teachers pull a version; an average that missed one begins again there."""
        if self.average is not None and version != self.taught_version:
            rate = RATE if version == self.taught_version + 1 else 1.0
            self.average += rate * (weight - self.average)
        self.taught_version = version

    async def keep(self, version: int) -> None:
        self.kept = ""
        self._try("keep")
        if self.taught_version != version:
            raise AverageLost(f"teachers are at version {self.taught_version}, not at {version}")
        self.kept = f"{version} {self.average!r}"

    async def write(self, draft: Path) -> list[WrittenFile]:
        self._try("write")
        if not self.kept:
            return []
        (draft / AVERAGE_FILE).write_text(self.kept)
        return written(draft, [draft / AVERAGE_FILE])

    async def restore(self, checkpoint: Path | None, version: int) -> bool:
        if checkpoint is not None and not (checkpoint / AVERAGE_FILE).exists():
            return False
        of, average = "0", "0.0"
        if checkpoint is not None:
            of, average = (checkpoint / AVERAGE_FILE).read_text().split()
        assert int(of) == version
        self.taught_version, self.average = version, float(average)
        self.log.append(("restore", version))
        return True

    async def sync(self, on_snapshot: MayTrain | None = None) -> int:
        self._try("sync")
        self.teach(self.version, self.weight)
        if on_snapshot is not None:
            on_snapshot()
        self.served.append((self.version, self.weight))
        return self.version

    def record(self, *event: str, **_: object) -> None:
        self.events.append(event)
        if event[0] == "trainer_restarted":
            self.told.set()

    def done(self, kind: str) -> list[Any]:
        return [entry[1] for entry in self.log if entry[0] == kind]


def batch(step: int) -> StepBatch:
    made = hinted.batch([10], [hinted.view("t0")])
    return StepBatch(step, made.samples, made.views, [])


class Running:
    """A run's trainer on the fakes, driven as the controller drives it."""

    def __init__(self, build_config: Any, root: Path, **sections: Any) -> None:
        trainer = {"checkpoint_every": 4, **sections.pop("trainer", {})}
        sections["sdpo"] = {"alpha": 0.5, **sections.get("sdpo", {})}
        run = {"name": "unit", "seed": 3, "steps": 12}
        self.config = build_config(trainer=trainer, run=run, **sections)
        self.world = World()
        if self.config.sdpo.teacher == "ema":
            self.world.average = 0.0
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.stored: dict[int, Trained] = {}
        """What the run's store has of each step that is done."""
        self.trainer = self.made(None)

    def made(self, begun: Checkpoint | None) -> FaultTolerantTrainer:
        world = self.world
        ports = (world, world, world, world if self.config.sdpo.has_own_actors else None)
        rest = (self.root, world.record, self.earlier, begun)
        return FaultTolerantTrainer(self.config, *ports, *rest)

    def earlier(self, first: int, until: int) -> list[Trained]:
        return [self.stored[step] for step in range(first, until) if step in self.stored]

    async def steps(self, first: int, last: int) -> None:
        """Train steps, save where it is due, and wait for the last of these checkpoints."""
        every = self.config.trainer.checkpoint_every
        for step in range(first, last):
            metrics = await self.trainer.train(batch(step))
            self.stored[step] = Trained(batch(step), metrics)
            assert await self.trainer.sync() == step + 1
            if every and (step + 1) % every == 0:
                await self.trainer.save(step + 1)
        await self.trainer.saved()

    def told(self) -> list[str]:
        return [event[2] for event in self.world.events if event[0] == "trainer_restarted"]

"""A supervised run: a run whose steps train conversations, and that samples for evaluations only.

    evaluate -> [ conversations of the step -> train ] -> ... -> sync -> evaluate

Everything else is that of a run: actors, restarts, checkpoints, resume, evaluations, reports.

The conversations, and which of them each step trains:

    sft.path -- rows --+--> encoded once --> an order for each epoch, by run.seed --> steps
    sft.demonstrations-+

A conversation is a sample with advantage 1, so that REINFORCE is next-token cross-entropy.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

from composer_mesh.configs.schema import Config
from composer_mesh.configs.sft import SftConfig
from composer_mesh.mesh.task_resources import serving
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.controller import Controller
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.run.assembly import TrainingRun
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.run.parts import RunParts
from composer_mesh.services.schedule.step_builder import PlannedStep, StepBuilder
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.step_manifest import manifest_from_json, manifest_to_json
from composer_mesh.services.store.rows import StepRow
from composer_mesh.tasks.chat_rows import encoded_rows
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import Demonstration, demonstrate, encode
from composer_mesh.tasks.task import Task

MOST_NAMED = 10
REPORT_EVERY = 500
"""Conversations between two reports of progress."""

Report = Callable[[int], None]
"""Called with the number of conversations that are encoded so far."""


@dataclass(frozen=True)
class CompactConversation:
    """An encoded conversation in few bytes: 4 and 1 for each id."""

    name: str
    ids: array[int]
    learn: bytes


@dataclass
class Dataset:
    """The conversations of a run, without those held out or longer than its context."""

    config: SftConfig
    seed: int
    rows: list[CompactConversation] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    """Names of the conversations that are left out for it."""
    held_out: int = 0
    """Rows that their column `split` holds out."""
    digest: int = 0
    """CRC-32 of all encoded conversations in order."""

    def add(self, name: str, one: Demonstration | None, longest: int) -> None:
        """Add a conversation, or note that it is held out, or longer than `longest` ids."""
        if one is None:
            self.held_out += 1
            return
        if len(one.ids) > longest:
            self.too_long.append(name)
            return
        self.rows.append(CompactConversation(name, array("i", one.ids), bytes(one.learn)))
        self.digest = zlib.crc32(self.rows[-1].ids.tobytes() + self.rows[-1].learn, self.digest)

    def batch(self, step: int) -> StepBatch:
        """Return the batch of a step; it depends on the seed and the conversations alone."""
        size = self.config.batch_size
        return StepBatch(step, [self._sample(step * size + n) for n in range(size)], [], [])

    def epoch(self, step: int) -> float:
        """Return how often the conversations have been trained once a step is done."""
        return (step + 1) * self.config.batch_size / len(self.rows)

    def __str__(self) -> str:
        ids = sum(len(one.ids) for one in self.rows)
        learnt = sum(sum(one.learn) for one in self.rows)
        summary = f"{len(self.rows):,} conversations of {ids:,} tokens, {learnt:,} of them imitated"
        if self.held_out:
            summary = f"{summary}; held out by the column 'split': {self.held_out:,}"
        if not self.too_long:
            return summary
        more = ", …" if len(self.too_long) > MOST_NAMED else ""
        return (
            f"{summary}; {len(self.too_long):,} longer than policy.max_context are left out: "
            f"{', '.join(self.too_long[:MOST_NAMED])}{more}"
        )

    def _sample(self, place: int) -> PolicySample:
        epoch, at = divmod(place, len(self.rows))
        one = self.rows[_order(self.seed, epoch, len(self.rows))[at]]
        size, mask = len(one.ids), [bool(learnt) for learnt in one.learn]
        name = f"{one.name} of epoch {epoch + 1}"
        return PolicySample(name, one.ids.tolist(), mask, [0.0] * size, 1.0, [-1] * size, place)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    """Return the order of the conversations in an epoch; a step may train the end of another."""
    order = list(range(count))
    random.Random(f"{seed}:sft:{epoch}").shuffle(order)
    return order


def load_dataset(config: Config, task: Task, chat: ChatFormat, report: Report) -> Dataset:
    """Read and encode the conversations of a config; raises UnusableTask.

    The task's tools are used by whoever calls it; demonstrations are played here.
    """
    assert config.sft is not None
    found = Dataset(config.sft, config.run.seed)
    longest = config.policy.max_context
    for number, (name, one) in enumerate(_conversations(config.sft, config, task, chat), 1):
        found.add(name, one, longest)
        if number % REPORT_EVERY == 0:
            report(number)
    if not found.rows:
        raise UnusableTask(
            f"no conversation remains to imitate: {len(found.too_long):,} are longer than "
            f"policy.max_context, which is {longest}, and {found.held_out:,} held out by their "
            "column 'split': raise policy.max_context, or give other rows"
        )
    if config.sft.batch_size > len(found.rows):
        raise UnusableTask(
            f"sft.batch_size is {config.sft.batch_size} but there are {len(found.rows)} "
            "conversations: lower it to that, or give more"
        )
    return found


def _conversations(
    sft: SftConfig, config: Config, task: Task, chat: ChatFormat
) -> Iterator[tuple[str, Demonstration | None]]:
    if sft.path is not None:
        for number, one in enumerate(encoded_rows(sft.path, chat), 1):
            yield f"row {number}", one
    rng = random.Random(f"{config.run.seed}:demonstrations")
    for index in range(sft.demonstrations):
        yield f"episode {index}", encode(chat, demonstrate(task, index, sft, rng))


DIGEST = "sft/dataset"


@dataclass(frozen=True)
class SftBatcher(Batcher):
    """Takes the batch of a step from the conversations, whatever was rolled out."""

    dataset: Dataset

    def batch(self, step: int, *_rollouts: Any, **_others: Any) -> StepBatch:
        """Return the batch of a step."""
        return self.dataset.batch(step)


class SftStep(PlannedStep):
    """A step of conversations; the policy channel's loss on them is reported as `loss/sft`."""

    def metrics(self, trained: dict[str, Any]) -> dict[str, Any]:
        """Return the step's metrics, except its durations; those of rollouts are 0 or None."""
        own = {"loss/sft": trained["loss/policy"], "loss/policy": None}
        return super().metrics(trained) | own | {"reward/mean": None, "reward/success": None}


SFT_CHANNELS = ["sft"]


class SftController(Controller):
    """Trains the steps of a supervised run; rolls out nothing but evaluations."""

    @property
    def channels(self) -> list[str]:
        """Names of the channels that the run trains."""
        return SFT_CHANNELS

    def _fill_window(self) -> None:
        """Start no group."""

    async def _planned_step(self, step: int) -> PlannedStep:
        planned, self._planned = self._planned, None
        if planned is None:
            assert isinstance(self.step_builder.batcher, SftBatcher)
            dataset = self.step_builder.batcher.dataset
            figures = {"sft/epoch": dataset.epoch(step), DIGEST: dataset.digest}
            compose = partial(self.step_builder.compose, step, [], None, figures)
            planned, manifest = await self.ports.in_thread(compose)
            await self.ports.store.plan_step(step, (), manifest_to_json(manifest))
        return SftStep(**vars(planned))

    async def _serve(self, steps: int) -> None:
        """Sync the new version where an evaluation needs it."""
        if self._evaluates_after(steps) or steps == self.config.run.steps:
            await super()._serve(steps)


@dataclass(frozen=True)
class SftParts(RunParts):
    """Builds the parts of a supervised run."""

    dataset: Dataset
    controller_class: ClassVar[type[Controller]] = SftController

    def _step_builder(self, report: Callable[[str], object]) -> StepBuilder:
        builder = super()._step_builder(report)
        one = builder.batcher
        given = (one.config, one.task, one.chat, one.advantages, one.report)
        return replace(builder, batcher=SftBatcher(*given, self.dataset))


def refuse_other(steps: Iterable[StepRow], dataset: Dataset) -> None:
    """Raise RunDirectoryError where steps so far have trained other conversations."""
    for row in steps:
        if manifest_from_json(row.step, row.manifest).figures.get(DIGEST) != dataset.digest:
            raise RunDirectoryError(
                f"the conversations are not those of step {row.step + 1}: restore sft.path as it "
                "was, or start a new run"
            )


@dataclass
class SftRun(TrainingRun):
    """State of one supervised run."""

    dataset: Dataset | None = None

    @property
    def channels(self) -> list[str]:
        """Names of the channels that the run trains."""
        return SFT_CHANNELS

    async def _train_from(
        self, mesh: RunMesh, folder: Path, task: Task, chat: ChatFormat, heldout: Sequence[int]
    ) -> None:
        self.view.phase("encoding conversations")
        self.dataset = await in_thread(partial(self._load, task, chat))
        self.event("conversations", "", str(self.dataset))
        await asyncio.to_thread(refuse_other, self.store.reading.steps(), self.dataset)
        await super()._train_from(mesh, folder, task, chat, heldout)

    def _load(self, task: Task, chat: ChatFormat) -> Dataset:
        assert self.config.sft is not None
        played = self.config.sft.demonstrations > 0
        with serving(self.config, task) if played else nullcontext():
            return load_dataset(self.config, task, chat, self._report)

    def _report(self, done: int) -> None:
        self.view.phase(f"encoding conversations, {done:,} done")

    def _parts(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> RunParts:
        assert self.dataset is not None
        rest = (self.config, self.store, mesh, task, chat, self.event)
        return SftParts(*rest, dataset=self.dataset)

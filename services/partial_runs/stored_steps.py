"""Training steps built from a run's store: stored steps first, then the remaining groups.

    a step with a manifest  rebuilt from its groups, pairs and late rewards
    groups without a step   `prompts_per_step` at a time in order, with their pairs; with dynamic
                            sampling without those whose rewards are all equal

A run that only sampled has no manifests.

Training on stored rollouts without generators.

Differences from the first training are reported at the end. Without generators and teacher replay
nothing is sampled, queried or evaluated.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import MeshError
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.replay.pair_stream import TakenPairs
from composer_mesh.services.schedule.step_builder import Group, PlannedStep, StepBuilder
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.services.steps.hint_writing import WrittenHints, worded_from_json
from composer_mesh.services.steps.logprob_mismatch import Differences, Trained
from composer_mesh.services.steps.ports import Store, Training, Watcher, WeightSync
from composer_mesh.services.steps.step_manifest import (
    ReplayOutcome,
    StepManifest,
    manifest_from_json,
)
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import DamagedRecord, GroupRow, GroupState, Where
from composer_mesh.services.traces.listing import acted

READABLE = (GroupState.FINISHED, GroupState.TRAINED)


class StoredStepLost(MeshError):
    """A step cannot be built from the store: its number, counted from 1, and the reason."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(step, why)
        self.step, self.why = step, why

    def __str__(self) -> str:
        return (
            f"step {self.step} cannot be made of the stored rollouts: {self.why}; "
            f"run.steps={self.step - 1} replays those before it"
        )


class OtherPolicy(MeshError):
    """The stored token ids are not those of this run's tokenizer and chat template."""

    def __init__(self, trace_id: str) -> None:
        super().__init__(trace_id)
        self.trace_id = trace_id

    def __str__(self) -> str:
        return (
            f"rollout {self.trace_id} begins with other ids than this policy's tokenizer and chat "
            "template write: give the policy of the run that has sampled it, by its config or by "
            "policy.path"
        )


@dataclass(frozen=True)
class StoredStep:
    """A step to train, and the metrics of its first training, None if there was none."""

    composed: PlannedStep
    before: Mapping[str, Any] | None


class StoredSteps:
    """The steps of one store, built for a config that may differ from the original one.

    Pairs without the reference scores that the config's loss needs are dropped and counted.
    """

    def __init__(self, reader: RunReader, config: Config, step_builder: StepBuilder) -> None:
        self._reader, self._config, self._step_builder = reader, config, step_builder
        self._ageless = replace(step_builder, batcher=_without_ages(step_builder.batcher))
        self._known = False
        self.pairs_left_out = 0

    def __iter__(self) -> Iterator[StoredStep]:
        """Yield at most `run.steps` steps.

        Raises StoredStepLost if one cannot be built, OtherPolicy if its token ids do not match.
        """
        pairs, step = self._pairs(), 0
        manifests = {row.step: row for row in self._reader.steps() if row.manifest}
        used: set[int] = set()
        while step < self._config.run.steps and (row := manifests.get(step)) is not None:
            manifest = manifest_from_json(step, row.manifest)
            used.update(manifest.groups, manifest.dropped)
            yield StoredStep(self._again(manifest, pairs), row.metrics)
            step += 1
        left = [row for row in self._reader.groups() if row.group_id not in used]
        for rows in self._chunks([row for row in left if self._trains(row)]):
            if step >= self._config.run.steps:
                return
            yield StoredStep(self._composed(step, rows, pairs), None)
            step += 1

    def _again(self, manifest: StepManifest, pairs: Mapping[str, PreferencePair]) -> PlannedStep:
        groups = [self._group(manifest.step, group_id) for group_id in manifest.groups]
        usable = [pairs[pair_id] for pair_id in manifest.pairs if pair_id in pairs]
        return self._step_builder.again(manifest, groups, usable)

    def _composed(
        self, step: int, rows: Sequence[GroupRow], pairs: Mapping[str, PreferencePair]
    ) -> PlannedStep:
        groups = [self._group(step, row.group_id) for row in rows]
        own = {trace.trace_id for group in groups for trace in group.traces}
        usable = [pair for pair in pairs.values() if pair.trace_id in own]
        taken = TakenPairs(usable, ReplayOutcome()) if self._config.replay.on else None
        return self._ageless.compose(step, groups, taken, {})[0]

    def _trains(self, row: GroupRow) -> bool:
        if row.state not in READABLE or not row.traces:
            return False
        if not self._config.schedule.dynamic_sampling:
            return True
        return len({one.reward for one in self._reader.rows(Where(group_id=row.group_id))}) > 1

    def _chunks(self, rows: Sequence[GroupRow]) -> Iterator[Sequence[GroupRow]]:
        size = self._config.schedule.prompts_per_step
        return (rows[place : place + size] for place in range(0, len(rows) - size + 1, size))

    def _group(self, step: int, group_id: int) -> Group:
        try:
            traces = self._reader.traces(group_id)
            worded = self._reader.hint_writer_output(group_id)
        except DamagedRecord as damaged:
            raise StoredStepLost(step + 1, str(damaged)) from None
        self._check_ids(traces)
        return Group(group_id, traces, worded_from_json(worded) if worded else WrittenHints())

    def _check_ids(self, traces: Sequence[Trace]) -> None:
        """Check the first prompt only: token ids match for all rollouts or for none."""
        trace = next((trace for trace in traces if trace.turns), None)
        if self._known or trace is None:
            return
        prompt = self._step_builder.batcher.chat.first_prompt(acted(trace).opening)
        if trace.turns[0].context_ids != prompt:
            raise OtherPolicy(trace.trace_id)
        self._known = True

    def _pairs(self) -> dict[str, PreferencePair]:
        """Return the pairs that this config can train on, none if its replay channel is off."""
        if not self._config.replay.on:
            return {}
        found = {row.pair_id: stored_pair(row) for row in self._reader.pairs()}
        if self._config.replay.needs_reference:
            usable = {name: pair for name, pair in found.items() if pair.reference is not None}
            self.pairs_left_out = len(found) - len(usable)
            return usable
        return found


def _without_ages(batcher: Batcher) -> Batcher:
    """Return a batcher that trains tokens of any age.

    Versions of groups that no step has taken are not those of this run.
    """
    config = batcher.config
    ageless = config.schedule.model_copy(update={"carried_groups": 0, "max_token_age": None})
    return replace(batcher, config=config.model_copy(update={"schedule": ageless}))


def as_trained(
    steps: Iterable[StoredStep], own: RunReader, first: int, until: int
) -> list[Trained]:
    """Return steps from `first` up to before `until`, with their metrics in the run `own`."""
    metrics = [row.metrics or {} for row in own.steps()][first:until]
    both = zip(islice(steps, first, until), metrics, strict=True)
    return [Trained(step.composed.batch, came) for step, came in both]


@dataclass(frozen=True)
class TrainingFromTracesPorts:
    """Dependencies of the training loop; `weights` is None if no teacher pulls."""

    trainer: Training
    weights: WeightSync | None
    store: Store
    watch: Watcher
    save: Callable[[int], Awaitable[None]]
    saved: Callable[[], Awaitable[None]]


class TrainingFromTraces:
    """Training loop over stored steps, in one event loop."""

    def __init__(
        self, config: Config, steps: Iterable[StoredStep], ports: TrainingFromTracesPorts
    ) -> None:
        self._steps, self._ports = iter(steps), ports
        self._every, self._last = config.trainer.checkpoint_every, config.run.steps
        self.differences = Differences()
        self.step = self._saved = 0

    async def run(self) -> None:
        """Train all stored steps, then save. Waits for the last checkpoint."""
        # Building a batch reads files and uses the CPU, which would block the event loop.
        while (stored := await asyncio.to_thread(next, self._steps, None)) is not None:
            await self._one_step(stored)
        if self.step != self._saved:
            await self._save()
        await self._ports.saved()

    async def _save(self) -> None:
        await self._ports.save(self.step)
        self._saved = self.step

    async def _one_step(self, stored: StoredStep) -> None:
        now = asyncio.get_running_loop().time
        ports, batch, began = self._ports, stored.composed.batch, now()
        await ports.store.plan_step(batch.step, (), b"")
        trained = await ports.trainer.train(batch)
        stepped = now()
        if ports.weights is not None:
            await ports.weights.sync()
        metrics = stored.composed.metrics(trained)
        metrics["time/step_s"], metrics["time/train_s"] = now() - began, stepped - began
        metrics["time/weight_sync_s"] = now() - stepped
        self.step = batch.step + 1
        await ports.store.end_step(batch.step, metrics)
        ports.watch.update(metrics)
        if stored.before is not None:
            self.differences.note(Trained(batch, dict(stored.before)), trained)
        if self._every and self.step % self._every == 0 and self.step < self._last:
            await self._save()

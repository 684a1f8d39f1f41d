"""Rollout groups in flight: started in order of entry, stored as they finish.

    enter -> samples -> stored -> teachers queried concurrently -> hint texts stored -> collect

A group that an earlier process of the run has stored is reused unmodified. How far ahead groups may
enter is decided by the rollout window, what they are used for by the controller. With dynamic
sampling a group whose rewards are all equal is stored, and nothing else is done with it.

State recovered on resume; empty for a new run.

Plain values; `resume_loader` reads them from a run directory.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.actors.checkpoints.folder import Checkpoint
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import heard
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.curriculum import EpisodeOrder
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.traces import Split, Trace, equal_rewards
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.replay.pair_stream import PairStream
from composer_mesh.services.schedule.step_builder import Group, PlannedStep
from composer_mesh.services.steps.hint_writing import HintWriting, WrittenHints, worded_to_json
from composer_mesh.services.steps.logprob_mismatch import Trained
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.task import Task


@dataclass(frozen=True)
class StoredGroup:
    """A finished group; `worded` is None where no hint texts were requested."""

    traces: list[Trace]
    worded: WrittenHints | None = None


@dataclass(frozen=True)
class ResumeState:
    """Progress recovered on resume: `steps` steps are done, and the trainer has their version.

    `past` are the done steps after the checkpoint, which are recomputed; `planned` is the next step
    where its manifest was written but its training did not finish. `groups` are the stored groups
    that no step has taken. `next_group` is the first group, stored or not, such that none has taken
    it or a later one, and `carried` are the earlier ones that none has taken.
    """

    steps: int = 0
    checkpoint: Checkpoint | None = None
    past: list[Trained] = field(default_factory=list)
    planned: PlannedStep | None = None
    groups: dict[int, StoredGroup] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    next_group: int = 0
    carried: list[int] = field(default_factory=list)


Sampled = asyncio.Task[Trace | None]


class Groups:
    """The rollout groups of one run, on one event loop.

    `replay` and `hints` are None where their channel is off. `heldout` are the indices of an
    evaluation's episodes (`heldout_indices`; they take long to find in a large task). `on_drop` is
    called with each finished group that dynamic sampling will drop. `order` chooses the episodes of
    training groups.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        rollouts: Rollouts,
        store: Store,
        replay: PairStream | None,
        hints: HintWriting | None,
        stored: Mapping[int, StoredGroup],
        heldout: Sequence[int] = (),
        on_drop: Callable[[int], None] = lambda _: None,
        order: EpisodeOrder | None = None,
    ) -> None:
        self._config, self._task, self._rollouts, self._store = config, task, rollouts, store
        self._replay, self._hints, self._stored = replay, hints, dict(stored)
        self._heldout, self._on_drop = heldout, on_drop
        self._order = order or EpisodeOrder()
        self._cancelled = 0
        self.running: dict[int, asyncio.Task[Group]] = {}
        """Groups by id that entered and are not collected yet, in order of entry."""
        self._finishes = asyncio.Event()
        self._samples: set[Sampled] = set()

    def enter(self, group_ids: Sequence[int], version: int) -> None:
        """Start groups while `version` is served; groups that are already stored are not sampled
        again."""
        stored = {group_id: self._stored.pop(group_id, None) for group_id in group_ids}
        # A synchronous run batches closed sets of requests: one missing group needs all the others
        # resampled.
        again = self._config.schedule.max_lag == 0 and None in stored.values()
        for group_id, before in stored.items():
            self._store.enter(group_id, version)
            episode, samples = self._order.choose(group_id, version), None
            if before is None or again:
                sampling = Sampling.training(self._config)
                samples = self._start("train", episode, group_id, sampling)
            group = self._finish(group_id, samples, before or StoredGroup([]))
            self.running[group_id] = asyncio.create_task(group)
            self.running[group_id].add_done_callback(lambda _: self._finishes.set())

    async def collect(self, count: int) -> list[Group]:
        """Return the first finished groups in order of entry; waits for them.

        At most `carried_groups` unfinished ones are passed over.
        """
        while (found := self._first_finished(count)) is None:
            self._finishes.clear()
            await self._finishes.wait()
        groups, passed = found
        for group in groups:
            del self.running[group.group_id]
        if self._replay is not None:
            self._replay.pass_over(passed)
        return groups

    def _first_finished(self, count: int) -> tuple[list[Group], list[int]] | None:
        """Return the groups to collect and those to pass over, None while too few have finished."""
        groups, passed = list[Group](), list[int]()
        for group_id, running in self.running.items():
            if running.done():
                groups.append(running.result())
            else:
                passed.append(group_id)
            if len(groups) == count:
                return groups, passed
            if len(passed) > self._config.schedule.carried_groups:
                break
        return None

    def figures(self) -> dict[str, int]:
        """Return the count of over-provisioned rollouts that were cancelled since the last call."""
        cancelled, self._cancelled = self._cancelled, 0
        return {"rollouts/cancelled": cancelled} if self._config.schedule.overprovision else {}

    async def evaluate(self) -> list[Trace]:
        """Run held-out episodes; return the traces of those that could be run. Waits for all."""
        sampling = Sampling.evaluation(self._config)
        started = [self._start("heldout", index, index, sampling) for index in self._heldout]
        return await gather_or_cancel([sample for samples in started for sample in samples])

    async def close(self) -> None:
        """Cancel every group and sample under way."""
        under_way: list[asyncio.Task[Any]] = [*self.running.values(), *self._samples]
        await cancel_and_wait(under_way)

    async def _finish(
        self, group_id: int, samples: list[Sampled] | None, before: StoredGroup
    ) -> Group:
        """Wait for a group's samples, store them, and query the hint writer.

        Teacher queries start here but are not awaited here. A group may have fewer samples than
        requested, or none.
        """
        traces = before.traces
        if samples is not None:
            scored = await self._rollouts.comparable(self._task, await self._finished(samples))
            traces = await self._store.add_group(group_id, scored)
        dropped = self._config.schedule.dynamic_sampling and equal_rewards(traces)
        self._query_teachers(group_id, [] if dropped else traces)
        if dropped:
            self._on_drop(group_id)
            return Group(group_id, traces, before.worded or WrittenHints())
        if before.worded is not None:
            return Group(group_id, traces, before.worded)
        return Group(group_id, traces, await self._words_for(group_id, traces))

    async def _finished(self, samples: list[Sampled]) -> list[Trace]:
        """Return a group's traces; over-provisioned samples that are not needed are cancelled."""
        if not self._config.schedule.overprovision:
            return await gather_or_cancel(samples)
        traces, cancelled = await first_to_finish(samples, self._config.schedule.group_size)
        self._cancelled += cancelled
        return traces

    def _query_teachers(self, group_id: int, traces: list[Trace]) -> None:
        if self._replay is not None and traces:
            self._replay.begin(traces)
        elif self._replay is not None:
            self._replay.skip(group_id)

    async def _words_for(self, group_id: int, traces: Sequence[Trace]) -> WrittenHints:
        """Return the hint writer's texts for a group, after storing them. Waits for the writer."""
        if self._hints is None or not traces:
            return WrittenHints()
        worded = await self._hints.ask(traces)
        await self._store.add_worded(group_id, worded_to_json(worded))
        return worded

    def _start(self, split: Split, index: int, group_id: int, sampling: Sampling) -> list[Sampled]:
        size = self._config.schedule.samples_per_group if split == "train" else 1
        episode = self._task.pick(split, index)
        samples = self._rollouts.start(episode, group_id, size, sampling)
        self._samples.update(samples)
        for sample in samples:
            sample.add_done_callback(self._samples.discard)
        return samples


async def gather_or_cancel(tasks: list[Sampled]) -> list[Trace]:
    """Return the traces in order, without samples that were given up.

    When a sample fails permanently or the wait is cancelled, the others are cancelled.
    """
    try:
        return [trace for trace in await asyncio.gather(*tasks) if trace is not None]
    finally:
        for task in tasks:
            task.cancel()


async def first_to_finish(tasks: list[Sampled], count: int) -> tuple[list[Trace], int]:
    """Return the first `count` traces to finish, by sample, and the number of unused samples.

    Samples that were given up count as neither. When a sample fails permanently or the wait is
    cancelled, the others are cancelled, as they are at the end.
    """
    found: list[Trace] = []
    unused = len(tasks)
    try:
        for finished in asyncio.as_completed(tasks):
            trace = await finished
            unused -= 1
            found += [trace] if trace is not None else []
            if len(found) == count:
                break
        return sorted(found, key=lambda trace: trace.sample), unused
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(heard)

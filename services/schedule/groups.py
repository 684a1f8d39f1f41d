"""Rollout groups in flight: started in order of entry, stored as they finish.

    enter -> samples -> stored -> teachers queried concurrently -> hint texts stored -> collect

A group that an earlier process of the run has stored is reused unmodified. How far ahead groups may
enter is decided by the rollout window, what they are used for by the controller.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.rollouts.tasks import Task
from composer_mesh.rollouts.traces import Split, Trace
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.replay.pair_stream import PairStream
from composer_mesh.services.schedule.resume_state import StoredGroup
from composer_mesh.services.schedule.step_builder import Group
from composer_mesh.services.steps.hint_writing import HintWriting, WordedHints, worded_to_json
from composer_mesh.services.steps.ports import Store

Sampled = asyncio.Task[Trace | None]


class Groups:
    """The rollout groups of one run, on one event loop.

    `replay` and `hints` are None where their channel is off. `heldout` are the indices of an
    evaluation's episodes (`heldout_indices`; they take long to find in a large task).
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
    ) -> None:
        self._config, self._task, self._rollouts, self._store = config, task, rollouts, store
        self._replay, self._hints, self._stored = replay, hints, dict(stored)
        self._heldout = heldout
        self.running: deque[asyncio.Task[Group]] = deque()
        """Groups that entered and are not collected yet, in order of entry."""
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
            samples = None
            if before is None or again:
                samples = self._start("train", group_id, Sampling.training(self._config))
            group = self._finish(group_id, samples, before or StoredGroup([]))
            self.running.append(asyncio.create_task(group))

    async def collect(self, count: int) -> list[Group]:
        """Return the next groups in order of entry. Waits for the slowest of them."""
        groups = [await self.running[place] for place in range(count)]
        for _ in groups:
            self.running.popleft()
        return groups

    async def evaluate(self) -> list[Trace]:
        """Run held-out episodes; return the traces of those that could be run. Waits for all."""
        sampling = Sampling.evaluation(self._config)
        started = [s for index in self._heldout for s in self._start("heldout", index, sampling)]
        return await gather_or_cancel(started)

    async def close(self) -> None:
        """Cancel every group and sample under way."""
        under_way: list[asyncio.Task[Any]] = [*self.running, *self._samples]
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
            finished = await gather_or_cancel(samples)
            traces = await self._store.add_group(group_id, finished)
        if self._replay is not None and traces:
            self._replay.begin(traces)
        elif self._replay is not None:
            self._replay.skip(group_id)
        if before.worded is not None:
            return Group(group_id, traces, before.worded)
        return Group(group_id, traces, await self._words_for(group_id, traces))

    async def _words_for(self, group_id: int, traces: Sequence[Trace]) -> WordedHints:
        """Return the hint writer's texts for a group, after storing them. Waits for the writer."""
        if self._hints is None or not traces:
            return WordedHints()
        worded = await self._hints.ask(traces)
        await self._store.add_worded(group_id, worded_to_json(worded))
        return worded

    def _start(self, split: Split, index: int, sampling: Sampling) -> list[Sampled]:
        size = self._config.schedule.group_size if split == "train" else 1
        episode = self._task.episode(split, index)
        samples = self._rollouts.start(episode, index, size, sampling)
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

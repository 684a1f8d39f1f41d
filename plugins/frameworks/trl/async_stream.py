"""Groups of episodes played for TRL's AsyncGRPOTrainer: as many as it can train in time."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.supervision import MeshError
from composer_mesh.mesh.waiting import in_thread
from composer_mesh.plugins.frameworks.trl.async_samples import (
    Figures,
    RolloutBuffer,
    group_figures,
    group_samples,
    offer,
)
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.episodes.retries import Retries
from composer_mesh.services.schedule.groups import Groups
from composer_mesh.services.schedule.step_builder import Group

FOLDER = "rollouts"
"""Folder of the mesh in the trainer's output folder: a run directory with events and rollouts."""


class MeshFailed(RuntimeError):
    """The mesh that plays rollouts has ended; the message says why."""


class OlderWeights(MeshError):
    """A group has tokens of weights that no generator should have served any more."""

    def __init__(self, group_id: int, entered: int, oldest: int) -> None:
        super().__init__(group_id, entered, oldest)

    def __str__(self) -> str:
        group_id, entered, oldest = self.args
        return (
            f"group {group_id} entered when all generators served version {entered} but has "
            f"tokens of version {oldest}: a generator did not pull the weights that were sent"
        )


@dataclass(frozen=True)
class SampleQueues:
    """Where samples and figures go, and the most rollouts that are played or wait."""

    samples: RolloutBuffer
    figures: queue.Queue[Any]
    most: int


class SampleStream:
    """Plays groups of episodes while it is open; hands over their samples in order of entry.

    `next_group` is the first group that enters, `restarts` returns how many processes have been
    replaced. All methods are called on one event loop.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        retries: Retries,
        queues: SampleQueues,
        next_group: int = 0,
        restarts: Callable[[], int] = lambda: 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._groups, self._retries = config, groups, retries
        self._queues, self._restarts, self._now = queues, restarts, now
        self._size = config.schedule.group_size
        self.next_group = next_group
        self.unfinished = 0
        """Number of groups that entered and are not handed over yet."""
        self.progressed_at = now()
        """When a group has last entered or finished."""
        self.is_open = False
        self.version = 0
        """The version that every generator has pulled."""
        self._closed, self._entered = False, asyncio.Event()
        self._versions: dict[int, int] = {}
        self._sizes: list[int] = []
        self._steps = self._reported_restarts = self._reported_drops = 0
        self._told_at = now()

    def open(self) -> None:
        """Let groups enter from now on."""
        self.is_open = not self._closed
        self._progressed()
        self.admit()

    def pause(self) -> None:
        """Let no group enter until `open`; those that have entered are played on."""
        self.is_open = False

    def close(self) -> None:
        """Let no group enter any more."""
        self._closed, self.is_open = True, False

    def admit(self) -> None:
        """Start groups while there is room for all their rollouts."""
        while self.is_open and self._outstanding + self._size <= self._queues.most:
            self._groups.enter([self.next_group], self.version)
            self._groups.running[-1].add_done_callback(self._progressed)
            self._versions[self.next_group] = self.version
            self._progressed()
            self.next_group += 1
            self.unfinished += 1
            self._entered.set()

    async def run(self) -> None:
        """Hand over groups until cancelled. Raises what ends a run, such as `RolloutsFail`."""
        while True:
            while not self.unfinished:
                self._entered.clear()
                await self._entered.wait()
            (group,) = await self._groups.collect(1)
            self._check_versions(group)
            samples = await in_thread(group_samples, group.group_id, self._kept(group))
            for sample in samples:
                self._queues.samples.put_nowait(sample)
            self.unfinished -= 1
            self._tell(group, dropped=not self._kept(group))
            self._check(len(group.traces))
            self.admit()

    def check(self, stale_after_s: float) -> None:
        """Raise MeshFailed where groups may enter, and none has entered or finished for so long."""
        silent_s = self._now() - self.progressed_at
        if self.is_open and silent_s > stale_after_s:
            raise MeshFailed(
                f"no group of rollouts has finished for {silent_s:.0f} s, but "
                f"heartbeat_stale_after_s is {stale_after_s:g}, and {self.unfinished} are being "
                f"played: look for failures in {FOLDER}/events.jsonl of the output folder, or "
                "raise heartbeat_stale_after_s if episodes take longer"
            )

    @property
    def _outstanding(self) -> int:
        return self.unfinished * self._size + self._queues.samples.qsize()

    def _check_versions(self, group: Group) -> None:
        entered = self._versions.pop(group.group_id)
        versions = (version for trace in group.traces for version in trace.versions())
        if (oldest := min(versions, default=entered)) < entered:
            raise OlderWeights(group.group_id, entered, oldest)

    def _kept(self, group: Group) -> Sequence[Trace]:
        drops = self._config.schedule.dynamic_sampling and equal_rewards(group.traces)
        return [] if drops else group.traces

    def _progressed(self, _: object = None) -> None:
        self.progressed_at = self._now()

    def _check(self, size: int) -> None:
        """Raise RolloutsFail where most rollouts of two steps' worth of groups have failed."""
        self._sizes.append(size)
        if len(self._sizes) == self._config.schedule.prompts_per_step:
            sizes, self._sizes, self._steps = self._sizes, [], self._steps + 1
            self._retries.check_step(self._steps, sizes, self._size)

    def _tell(self, group: Group, dropped: bool) -> None:
        """Offer the figures of a group, and counts since the group before."""
        now, tokens = self._now(), sum(trace.action_tokens() for trace in group.traces)
        restarts, drops = self._restarts(), self._queues.samples.dropped
        counts = self._retries.figures()
        figures: Figures = {
            **group_figures(group.traces),
            "rollout/inflight": float(self.unfinished * self._size),
            "rollout/generated_tok_s": (float(tokens), now - self._told_at),
            "rollout/retried_total": float(counts["rollouts/retried"]),
            "rollout/given_up_total": float(counts["rollouts/given_up"]),
            "rollout/poisoned_total": float(counts["rollouts/poisoned"]),
            "rollout/restarts_total": float(restarts - self._reported_restarts),
            "rollout/dropped_stale_total": float(drops - self._reported_drops),
            "rollout/dropped_equal_total": float(dropped),
        }
        self._told_at, self._reported_restarts, self._reported_drops = now, restarts, drops
        offer(self._queues.figures, figures)

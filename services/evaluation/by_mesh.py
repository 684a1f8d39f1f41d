"""Evaluates a policy with the generators, environments and rollout workers of a run.

A partial run without a trainer: held-out episodes, one policy version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sampling
from composer_mesh.services.episodes.rollout import Rollouts
from composer_mesh.services.partial_runs.command import PartialRun
from composer_mesh.services.run.mesh import RunHalf, RunMesh
from composer_mesh.services.run.parts import RunParts
from composer_mesh.services.run.resume_loader import ResumeContents
from composer_mesh.services.schedule.groups import Sampled, gather_or_cancel
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.task import Task


@dataclass
class EvaluationRun(PartialRun):
    """Held-out samples by the actors of a run; `indices` are the episodes that are left."""

    half: RunHalf = "sampling"
    indices: Sequence[int] = field(default_factory=list)
    samples: int = 1

    async def _work(self, mesh: RunMesh, task: Task, chat: ChatFormat) -> None:
        parts = RunParts(self.config, self.store, mesh, task, chat, self.event)
        rollouts = parts.rollouts(ResumeContents())
        self.view.phase("evaluating")
        sampling = Sampling.evaluation(self.config)
        try:
            await play_heldout(task, rollouts, self.store, self.indices, self.samples, sampling)
        finally:
            await rollouts.close()
        self.summary = f"{len(self.indices)} episodes played"

    def _steps_done(self) -> int:
        return 0


async def play_heldout(
    task: Task,
    rollouts: Rollouts,
    store: Store,
    indices: Sequence[int],
    samples: int,
    sampling: Sampling,
) -> None:
    """Play held-out episodes and store each as a group. Waits for all.

    An episode of which no sample could be played is not stored.
    """

    async def finish(index: int, started: list[Sampled]) -> None:
        if traces := await rollouts.comparable(task, await gather_or_cancel(started)):
            store.enter(index, 0)
            await store.add_group(index, traces)

    groups = [
        asyncio.create_task(
            finish(index, rollouts.start(task.pick("heldout", index), index, samples, sampling))
        )
        for index in indices
    ]
    try:
        await asyncio.gather(*groups)
    finally:
        await cancel_and_wait(groups)

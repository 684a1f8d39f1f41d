"""The parts of a server together: what accepts operations, what executes them, what tidies up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from composer_mesh.actors.group_commit import GroupCommit
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.backend import SampleBackend, TrainBackend
from composer_mesh.plugins.tinker.server.executing import Executing
from composer_mesh.plugins.tinker.server.fair_queue import SampleQueue, TrainingQueue
from composer_mesh.plugins.tinker.server.housekeeping import Housekeeping, delete_abandoned
from composer_mesh.plugins.tinker.server.model_store import ModelStore
from composer_mesh.plugins.tinker.server.payloads import Payloads
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.sampling_lane import SamplingFacts, SamplingLane
from composer_mesh.plugins.tinker.server.server import Served, TrainingServer
from composer_mesh.plugins.tinker.server.training_lane import TrainingLane

EXECUTING = "executing"


@dataclass(frozen=True)
class Sizes:
    """How much is computed at once: tokens of a group of operations, and samples."""

    tokens_at_once: int
    samples_at_once: int


class ServerTasks:
    """A server with its lanes; `run` executes operations until it is cancelled."""

    def __init__(
        self,
        served: Served,
        folder: Path,
        commits: GroupCommit,
        found: log.LoggedRecords,
        trainer: TrainBackend,
        samplers: SampleBackend,
        facts: SamplingFacts,
        executing: Executing,
        sizes: Sizes,
    ) -> None:
        limits, self.folder = served.limits, folder
        training, samples = TrainingQueue(), SampleQueue()
        self._commits, self._executing = commits, executing
        self.registry = Registry(commits, found, limits)
        payloads = Payloads(commits, served.data)
        self.server = TrainingServer(served, self.registry, commits, training, samples, payloads)
        answered = self.server.answered
        rest = (self.registry, commits, trainer)
        most, keep = limits.models_in_memory, limits.keep_operations
        self.store = ModelStore(folder, *rest, served.data, most, keep)
        self.training = TrainingLane(
            folder,
            training,
            *rest,
            self.store,
            answered,
            executing,
            payloads,
            models_at_once=min(limits.batched_models, limits.models_in_memory),
            tokens_at_once=sizes.tokens_at_once,
            save_every=limits.save_every,
            most_repeated=int(limits.max_repeated_mb * 1e6),
            gap_s=limits.gap_s,
        )
        at_once = sizes.samples_at_once
        more = (self.registry, commits, samplers, facts, answered, executing, payloads, at_once)
        self.sampling = SamplingLane(folder, samples, *more)
        self.server.wake_training = self.training.wake
        self.server.wake_sampling = self.sampling.wake
        self.housekeeping = Housekeeping(folder, limits, self.registry, commits, self.server)

    async def recover(self) -> int:
        """Queue the operations that the log has unanswered; return how many there are.

        What was being executed when the last process was killed has one attempt more.
        """
        await asyncio.to_thread(delete_abandoned, self.folder, self.registry)
        left = self._executing.left
        await self._commits.run(partial(log.count_attempts, numbers=left))
        self._executing.clear()
        return await self.server.recover()

    async def run(self) -> None:
        """Execute operations and tidy up, forever. Raises what ends any of it."""
        parts = (self.training, self.sampling, self.housekeeping)
        running = [asyncio.create_task(one.run()) for one in parts]
        try:
            done, _ = await asyncio.wait(running, return_when="FIRST_COMPLETED")
            for one in done:
                one.result()
        finally:
            self.server.ended.set()
            await cancel_and_wait(running)


@contextmanager
def opened_log(path: Path) -> Iterator[tuple[GroupCommit, Executing]]:
    """Open a server's log, and what it executes, for a block of this event loop."""
    file = log.open_log(path)
    commits, executing = GroupCommit(file), Executing(path.with_name(EXECUTING))
    try:
        yield commits, executing
    finally:
        commits.close()
        executing.close()
        file.close()

"""The parts of a server together: what accepts operations, what executes them, what tidies up.

`Housekeeping` drops what is kept for a time only: answers, expired weights, old snapshots, files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.backend import SampleBackend, TrainBackend
from composer_mesh.plugins.tinker.server.fair_queue import SampleQueue, TrainingQueue
from composer_mesh.plugins.tinker.server.model_store import ModelStore
from composer_mesh.plugins.tinker.server.payloads import Payloads
from composer_mesh.plugins.tinker.server.records import Executing
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.sampling_lane import SamplingFacts, SamplingLane
from composer_mesh.plugins.tinker.server.server import ServedModel, TrainingServer
from composer_mesh.plugins.tinker.server.training_lane import TrainingLane

EVERY_S = 30.0


class Housekeeping:
    """Looks after the log and the files of a server."""

    def __init__(
        self,
        folder: Path,
        limits: ServeConfig,
        registry: Registry,
        commits: GroupCommit,
        server: TrainingServer,
    ) -> None:
        self._folder, self._limits, self._registry = folder, limits, registry
        self._commits, self._server = commits, server

    async def run(self) -> None:
        """Tidy up from time to time, forever."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.drop_expired()

    async def drop_expired(self) -> None:
        """Drop what is over."""
        before = time.time() - self._limits.result_s
        most = int(self._limits.max_results_gb * 1e9)
        each = int(self._limits.max_results_gb_per_client * 1e9)
        job = partial(log.expire, before=before, most_bytes=most, most_of_client=each)
        await self._commits.repeat(job)
        for model in await self._registry.free_unused():
            if model.file:
                await asyncio.to_thread((self._folder / model.file).unlink, missing_ok=True)
        for saved in self._registry.expired():
            await self._registry.delete_saved(saved)
        if outdated := self._registry.outdated(self._limits.unnamed_kept):
            await self._registry.forget_samplers(outdated)
        kept, writing = self._registry.files(), self._server.open_numbers()
        await asyncio.to_thread(_delete_others, self._folder, kept, writing)


def _delete_others(folder: Path, kept: Collection[str], writing: Collection[int]) -> None:
    """Delete files of saved weights that are neither kept nor being written."""
    for path in (folder / "saved").glob("*.safetensors"):
        if f"saved/{path.name}" not in kept and int(path.stem) not in writing:
            path.unlink(missing_ok=True)


def delete_abandoned(folder: Path, registry: Registry) -> None:
    """Delete states that no model names: of a process that ended before it said so."""
    named = {one.file for one in registry.models()}
    for path in (folder / "models").glob("*/*"):
        if f"models/{path.parent.name}/{path.name}" not in named:
            path.unlink(missing_ok=True)


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
        served: ServedModel,
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

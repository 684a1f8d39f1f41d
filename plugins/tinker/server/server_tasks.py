"""The parts of a server together: what accepts operations, what executes them, what tidies up.

`Housekeeping` drops what is kept for a time only: answers, expired weights, old snapshots, files.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from composer_mesh.actors.sqlite_file import GroupCommit, SqliteFile
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.backend import SampleBackend, TrainBackend
from composer_mesh.plugins.tinker.server.model_store import ModelStore
from composer_mesh.plugins.tinker.server.records import Executing
from composer_mesh.plugins.tinker.server.sampling_lane import SamplingLane
from composer_mesh.plugins.tinker.server.server import ServedModel, TrainingServer
from composer_mesh.plugins.tinker.server.training_lane import TrainingLane

EVERY_S = 30.0
LOG, EXECUTING = "operations.sqlite", "executing"


class Housekeeping:
    """Looks after the log and the files of a server."""

    def __init__(self, server: TrainingServer) -> None:
        self._server = server

    async def run(self) -> None:
        """Tidy up from time to time, forever."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.drop_expired()

    async def drop_expired(self) -> None:
        """Drop what is over."""
        folder, limits = self._server.folder, self._server.served.limits
        registry, before = self._server.registry, time.time() - limits.result_s
        most = int(limits.max_results_gb * 1e9)
        each = int(limits.max_results_gb_per_client * 1e9)
        job = partial(log.expire, before=before, most_bytes=most, most_of_client=each)
        await self._server.commits.repeat(job)
        for model in await registry.free_unused():
            if model.file:
                await asyncio.to_thread((folder / model.file).unlink, missing_ok=True)
        for saved in registry.expired():
            await registry.delete_saved(saved)
        if outdated := registry.outdated(limits.unnamed_kept):
            await registry.forget_samplers(outdated)
        kept, writing = registry.files(), self._server.open_numbers()
        await asyncio.to_thread(_delete_others, folder, kept, writing)


def _delete_others(folder: Path, kept: Collection[str], writing: Collection[int]) -> None:
    """Delete files of saved weights that are neither kept nor being written."""
    for path in (folder / "saved").glob("*.safetensors"):
        if f"saved/{path.name}" not in kept and int(path.stem) not in writing:
            path.unlink(missing_ok=True)


class ServerTasks:
    """A server with its lanes; `run` executes operations until it is cancelled."""

    def __init__(
        self, server: TrainingServer, trainer: TrainBackend, samplers: SampleBackend
    ) -> None:
        self.server, self.store = server, ModelStore(server, trainer)
        self.training = TrainingLane(server, trainer, self.store)
        self.sampling = SamplingLane(server, samplers)
        self.housekeeping = Housekeeping(server)

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


@asynccontextmanager
async def opened_server(served: ServedModel, folder: Path) -> AsyncIterator[TrainingServer]:
    """Open the server of a folder, with its log and what it executes, for a block."""
    file = SqliteFile(folder / LOG, log.KIND)
    commits, executing = GroupCommit(file), Executing(folder / EXECUTING)
    try:
        found = await commits.run(log.read_records)
        yield TrainingServer(served, folder, commits, found, executing)
    finally:
        commits.close()
        executing.close()
        file.close()

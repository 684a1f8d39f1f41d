"""Drops what is kept for a time only: answers, expired weights, old snapshots, files of neither."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

from composer_mesh.actors.group_commit import GroupCommit
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.registry import Registry
from composer_mesh.plugins.tinker.server.server import TrainingServer

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

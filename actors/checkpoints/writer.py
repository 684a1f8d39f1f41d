"""Writes one rank's part of a checkpoint concurrently with the following steps.

    copy    blocks training, no gathering: each tensor of this rank into a reused staging buffer
    write   in another thread: shards, training.json and, on the first rank, a model folder

Only the copy delays training. The caller commits the checkpoint.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.checkpoints.folder import CheckpointFailed
from composer_mesh.actors.checkpoints.manifest import Written, written
from composer_mesh.actors.checkpoints.state import (
    ADAPTERS,
    SHARDS,
    WEIGHTS,
    CheckpointReader,
    TrainingState,
    cause_of,
    without_ranks,
)
from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local
from composer_mesh.mesh.progress import made_progress

Export = Callable[[Path, dict[str, Tensor]], None]
"""Writes a model folder from the policy's complete tensors."""


class CheckpointWriter:
    """Writes one checkpoint at a time: `copy`, then `write`; collective over all ranks."""

    def __init__(self, ranks: Ranks, export: Export | None, adapters: Export | None = None) -> None:
        """`export` is None on ranks that write no model folder, `adapters` where there are none."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        fast = ranks.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=fast,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=fast,
        )
        self._ranks, self._export, self._adapters = ranks, export, adapters
        self._stager = DefaultStager(options)
        self._copied: TrainingState | None = None

    def copy(self, state: TrainingState) -> None:
        """Copy a state, which may change afterwards."""
        tensors: Any = self._stager.stage(dict(state.tensors))
        self._copied = TrainingState(state.version, tensors, state.figures, state.rng)
        made_progress("the copy of a checkpoint's state")

    def write(self, folder: Path, export: bool) -> list[Written]:
        """Write the copied state; return this rank's files, which are on disk by then.

        With `export`, the first rank also writes a model folder. Raises `CheckpointFailed`.
        """
        from composer_mesh.actors.checkpoints.shards import UNWRITABLE

        state = self._copied
        if state is None:
            raise RuntimeError("write comes after copy, and there was none")
        try:
            self._write_shards(state, folder / SHARDS)
            if self._ranks.rank == 0:
                state.write_figures(folder)
                if export and self._export is not None:
                    self._export(folder, self._whole(state, folder))
                    made_progress("the model folder of a checkpoint")
                    if self._adapters is not None:
                        self._adapters(folder, _of_kind(state, ADAPTERS))
            return written(folder, self._own(folder))
        except UNWRITABLE as error:
            raise CheckpointFailed(str(folder), cause_of(error)) from error

    def _write_shards(self, state: TrainingState, folder: Path) -> None:
        from composer_mesh.actors.checkpoints.shards import write_shards

        if self._ranks.size == 1:
            without_ranks()
        write_shards(folder, state.tensors, None if self._ranks.size == 1 else self._ranks.beside)

    def _whole(self, state: TrainingState, folder: Path) -> dict[str, Tensor]:
        """Return the policy's complete tensors, read from all shards if there are several ranks."""
        copied = {n: one for n, one in state.tensors.items() if n.startswith(WEIGHTS)}
        if self._ranks.size == 1:
            return {name.removeprefix(WEIGHTS): local(one) for name, one in copied.items()}
        found = {
            name.removeprefix(WEIGHTS): torch.empty(one.shape, dtype=one.dtype)
            for name, one in copied.items()
        }
        CheckpointReader(folder).read(WEIGHTS, found)
        return found

    def _own(self, folder: Path) -> list[Path]:
        """Return this rank's files: its shards, and on the first rank all others of the trainer.

        A teacher's own process writes its average into the same draft at the same time.
        """
        from composer_mesh.actors.checkpoints.shards import shard_files

        own = shard_files(folder / SHARDS, self._ranks.rank)
        if self._ranks.rank:
            return own
        paths = [path for path in folder.rglob("*") if path.is_file()]
        of_others = (folder / SHARDS, (folder / AVERAGE_FILE).parent)
        return own + [path for path in paths if path.parent not in of_others]


def _of_kind(state: TrainingState, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a kind that are complete on every rank, such as adapters."""
    own = {name: one for name, one in state.tensors.items() if name.startswith(kind)}
    return {name.removeprefix(kind): local(one) for name, one in own.items()}

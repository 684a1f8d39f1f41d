"""Stores the moving average of a teacher with its own process as a checkpoint file.

The average exists only in that process; without the file it would restart from the trainer's
weights. An inline teacher's average is part of the trainer's shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from composer_mesh.actors.checkpoints.folder import UnreadableCheckpoint
from composer_mesh.actors.checkpoints.manifest import WrittenFile, written
from composer_mesh.actors.models.optimizer_state import StateOfOtherWeights
from composer_mesh.configs.regular_files import open_regular

AVERAGE_FILE = "teacher/average.safetensors"


def write_average(folder: Path, average: dict[str, Tensor]) -> list[WrittenFile]:
    """Write the average into a checkpoint draft; return its file, which is on disk by then."""
    from safetensors.torch import save_file

    path = folder / AVERAGE_FILE
    path.parent.mkdir(exist_ok=True)
    save_file(average, path)
    return written(folder, [path])


def read_average(file: Path) -> "WholeTensors":
    """Read what `write_average` wrote; raises `UnreadableCheckpoint`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        open_regular(file).close()
        return WholeTensors(load_file(file))
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:500]
        raise UnreadableCheckpoint(str(file.parent.parent), why) from error


@dataclass(frozen=True)
class WholeTensors:
    """Complete tensors in memory, with the interface that restoring code reads from."""

    tensors: Mapping[str, Tensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            found = self.tensors[name]
            if found.shape != tensor.shape:
                raise StateOfOtherWeights(name, f"of shape {tuple(found.shape)} in the checkpoint")
            tensor.copy_(found)

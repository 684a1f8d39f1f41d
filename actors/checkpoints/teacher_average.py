"""The moving average of a teacher in a process of its own, as a file of a checkpoint.

Nobody else has it, so without the file it would begin again at the trainer's weights. An average
inside the trainer is among the trainer's shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from composer_mesh.actors.checkpoints.folder import UnreadableCheckpoint
from composer_mesh.actors.checkpoints.manifest import Written, written

AVERAGE_FILE = "teacher/average.safetensors"


def write_average(folder: Path, average: dict[str, Tensor]) -> list[Written]:
    """Write it into the draft of a checkpoint; returns its file, which is on disk then."""
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
        return WholeTensors(load_file(file))
    except (OSError, SafetensorError) as error:
        raise UnreadableCheckpoint(str(file.parent.parent), str(error)) from error


@dataclass(frozen=True)
class WholeTensors:
    """Tensors that were kept, as those read them who go on from them."""

    tensors: Mapping[str, Tensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(self.tensors[name])

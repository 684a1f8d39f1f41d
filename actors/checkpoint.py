"""What training needs to go on from a checkpoint, beside the policy itself.

A restart from it makes the same weights as no restart at all would have: the optimizer's moments,
TAID's position, the average of a teacher inside the trainer, adapters, and torch's random numbers,
which the losses here do not draw but a custom function may. All tensors are whole and by the names
of the weights, so another number of ranks may go on. Where checkpoints lie is `checkpoint_folder`.
"""

import pickle
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.checkpoint_folder import STATE_FILE
from composer_mesh.actors.ranks import Ranks
from composer_mesh.actors.trained_model import load_weights


class UnreadableCheckpoint(RuntimeError):
    """A checkpoint that training cannot go on from."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(folder, reason)

    def __str__(self) -> str:
        return (
            f"the checkpoint {self.args[0]} cannot be read ({self.args[1]}): move it away, and the "
            "run begins again from the one before it"
        )


@dataclass(frozen=True)
class TrainingState:
    """The state of one trainer at a version; `rng` holds an entry for each rank.

    `adapters` are what the policy's weights have been merged with, where adapters train.
    """

    version: int
    step: dict[str, Any]
    teacher: dict[str, Tensor] = field(default_factory=dict)
    rng: list[Tensor] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        torch.save({one.name: getattr(self, one.name) for one in fields(self)}, folder / STATE_FILE)

    @classmethod
    def load(cls, folder: Path) -> "TrainingState":
        """Read what `save` wrote; tensors stay in the file until they are used."""
        try:
            found = torch.load(folder / STATE_FILE, weights_only=True, mmap=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UnreadableCheckpoint(str(folder), str(error)) from error
        if not isinstance(found, dict) or found.keys() != {one.name for one in fields(cls)}:
            raise UnreadableCheckpoint(str(folder), "it was written by another version")
        return cls(**found)


def restore_weights(model: Any, folder: Path, ranks: Ranks | None = None) -> None:
    """Give a model, in place, the weights of the policy in a folder. All ranks together."""
    try:
        load_weights(model, folder, ranks or Ranks())
    except (OSError, RuntimeError) as error:
        raise UnreadableCheckpoint(str(folder), str(error)) from error

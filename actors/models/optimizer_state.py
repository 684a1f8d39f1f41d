"""Optimizer state, keyed by the names of the weights.

Learning rates and other hyperparameters come from the config and are not stored.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

COUNT = "step"
"""The only entry without the weights' shape: the number of updates."""


class Kept(Protocol):
    """Stored optimizer state: the shapes of complete tensors, and a method to read into tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, tensors: Mapping[str, Tensor]) -> None: ...


class OtherWeights(ValueError):
    """Stored state belongs to other weights than those that are trained."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(name, where)

    def __str__(self) -> str:
        return (
            f"{self.args[0]} is only {self.args[1]}: go on with the policy and the trainer.lora "
            "that the run began with"
        )


def optimizer_state_of(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return the optimizer's state of each weight, as `name/key`; shares its memory."""
    return {
        f"{name}/{key}": value
        for name, one in weights.items()
        for key, value in optimizer.state.get(one, {}).items()
    }


def check_weights(weights: Iterable[str], others: Iterable[str]) -> None:
    """Raise `OtherWeights` where the names in a checkpoint, `others`, differ."""
    own, theirs = set(weights), set(others)
    for name in sorted(own ^ theirs):
        raise OtherWeights(name, "in the checkpoint" if name in theirs else "in the model")


@torch.no_grad()
def restore_optimizer_state(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, kept: Kept
) -> None:
    """Restore an optimizer's state of its weights; each rank reads its rows."""
    found: dict[str, Tensor] = {}
    for place in kept.shapes():
        name, _, key = place.rpartition("/")
        if name not in weights:
            raise OtherWeights(name, "in the checkpoint")
        like = torch.zeros(()) if key == COUNT else torch.zeros_like(weights[name])
        found[place] = optimizer.state[weights[name]][key] = like
    kept.read(found)

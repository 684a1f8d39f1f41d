"""The moments of an optimizer by the names of the weights they belong to.

Learning rates and the like are the config's and are not kept. Who keeps the moments, and which rows
of them a rank gets back, is not known here.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

COUNT = "step"
"""What is no tensor of the weights' shape: how many updates there were."""


class Kept(Protocol):
    """Moments that were kept: the shapes of the whole ones, and a way to fill tensors with them."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, tensors: Mapping[str, Tensor]) -> None: ...


class OtherWeights(ValueError):
    """Moments of other weights than those that are trained."""

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
    """What the optimizer knows of each of the weights, by `name/moment`; shares its memory."""
    return {
        f"{name}/{key}": value
        for name, one in weights.items()
        for key, value in optimizer.state.get(one, {}).items()
    }


def check_weights(weights: Iterable[str], others: Iterable[str]) -> None:
    """Raise `OtherWeights` where those of a checkpoint, `others`, are not the same."""
    own, theirs = set(weights), set(others)
    for name in sorted(own ^ theirs):
        raise OtherWeights(name, "in the checkpoint" if name in theirs else "in the model")


@torch.no_grad()
def restore_optimizer_state(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, kept: Kept
) -> None:
    """Let an optimizer go on from moments of its weights; each rank takes its rows."""
    found: dict[str, Tensor] = {}
    for place in kept.shapes():
        name, _, key = place.rpartition("/")
        like = torch.zeros(()) if key == COUNT else torch.zeros_like(weights[name])
        found[place] = optimizer.state[weights[name]][key] = like
    kept.read(found)

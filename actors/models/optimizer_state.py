"""Optimizer state, keyed by the names of the weights.

Learning rates and other hyperparameters come from the config and are not stored.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

OF_WEIGHT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Entries with the shape of their weight; others have the shape that was stored."""


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


class UnsupportedState(ValueError):
    """An optimizer with state that checkpoints cannot store."""

    def __init__(self, optimizer: str, key: str, kind: str) -> None:
        super().__init__(optimizer, key, kind)

    def __str__(self) -> str:
        return (
            f"the optimizer {self.args[0]} keeps {self.args[1]!r} as a {self.args[2]}, but "
            "checkpoints store tensors: keep it as a tensor, or use another optimizer"
        )


def optimizer_state_of(
    weights: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return the optimizers' state of each weight, as `name/key`; shares its memory.

    Raises `UnsupportedState` for state that is no tensor.
    """
    found: dict[str, Tensor] = {}
    for name, one in weights.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(one, {}).items():
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise UnsupportedState(type(optimizer).__name__, key, kind)
                found[f"{name}/{key}"] = value
    return found


def check_weights(weights: Iterable[str], others: Iterable[str]) -> None:
    """Raise `OtherWeights` where the names in a checkpoint, `others`, differ."""
    own, theirs = set(weights), set(others)
    for name in sorted(own ^ theirs):
        raise OtherWeights(name, "in the checkpoint" if name in theirs else "in the model")


@torch.no_grad()
def restore_optimizer_state(
    weights: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], kept: Kept
) -> None:
    """Restore the optimizers' state of their weights; each rank reads its rows."""
    found: dict[str, Tensor] = {}
    holders = {
        id(one): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    }
    for place, shape in kept.shapes().items():
        name, _, key = place.rpartition("/")
        if name not in weights:
            raise OtherWeights(name, "in the checkpoint")
        weight = weights[name]
        like = torch.zeros_like(weight) if key in OF_WEIGHT else torch.zeros(shape)
        found[place] = holders[id(weight)].state[weight][key] = like
    kept.read(found)

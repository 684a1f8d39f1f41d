"""Optimizer state, keyed by the names of the weights.

Learning rates and other hyperparameters come from the config and are not stored.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from composer_mesh.actors.models.rows import from_rows, local
from composer_mesh.configs.worded import Worded

OF_WEIGHT = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Entries with the shape of their weight; others have the shape that was stored."""


class StoredOptimizerState(Protocol):
    """Stored optimizer state: the shapes of complete tensors, and a method to read into tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, tensors: Mapping[str, Tensor]) -> None: ...


@runtime_checkable
class StoredForm(Protocol):
    """An optimizer whose state is stored in another form than it has in memory."""

    def begin(self, weight: nn.Parameter, device: torch.device) -> None:
        """Give a weight the state from before its first update, on a device."""
        ...

    def stored(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return a weight's state as plain tensors, which share its memory."""
        ...


class StateOfOtherWeights(Worded, ValueError):
    """Stored state belongs to other weights than those that are trained."""

    message = "{0} is only {1}: go on with the policy and the trainer.lora that the run began with"


class UnsupportedState(Worded, ValueError):
    """An optimizer with state that checkpoints cannot store."""

    message = (
        "the optimizer {0} keeps {1!r} as a {2}, but checkpoints store tensors: keep it as a "
        "tensor, or use another optimizer"
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
            if isinstance(optimizer, StoredForm):
                found |= {f"{name}/{key}": value for key, value in optimizer.stored(one).items()}
                continue
            for key, value in optimizer.state.get(one, {}).items():
                if not isinstance(value, Tensor):
                    kind = type(value).__name__
                    raise UnsupportedState(type(optimizer).__name__, key, kind)
                found[f"{name}/{key}"] = value
    return found


def check_weights(weights: Iterable[str], others: Iterable[str]) -> None:
    """Raise `StateOfOtherWeights` where the names in a checkpoint, `others`, differ."""
    own, theirs = set(weights), set(others)
    for name in sorted(own ^ theirs):
        raise StateOfOtherWeights(name, "in the checkpoint" if name in theirs else "in the model")


@torch.no_grad()
def restore_optimizer_state(
    weights: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    kept: StoredOptimizerState,
    device: torch.device | None = None,
) -> None:
    """Restore the optimizers' state of their weights; each rank reads its rows.

    On the device of the weights, unless another is given.
    """
    found: dict[str, Tensor] = {}
    holders = {
        id(one): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
    }
    for place, shape in kept.shapes().items():
        if place in found:
            continue
        name, _, key = place.rpartition("/")
        if name not in weights:
            raise StateOfOtherWeights(name, "in the checkpoint")
        weight = weights[name]
        optimizer = holders[id(weight)]
        if isinstance(optimizer, StoredForm):
            optimizer.begin(weight, device or weight.device)
            found |= {f"{name}/{key}": one for key, one in optimizer.stored(weight).items()}
            continue
        like = _zeros_of(weight, device) if key in OF_WEIGHT else torch.zeros(shape)
        found[place] = optimizer.state[weight][key] = like
    kept.read(found)


def _zeros_of(weight: nn.Parameter, device: torch.device | None) -> Tensor:
    return from_rows(torch.zeros_like(local(weight.detach()), device=device), weight, weight.shape)

"""The moments of an optimizer by the names of the weights they belong to, whole tensors each.

So any number of ranks, sharded or not, goes on from what any other number has written. Learning
rates and the like are the config's and are not kept.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.actors.rows import gathered, rows_of

Moments = dict[str, dict[str, Tensor]]
COUNT = "step"
"""What is no tensor of the weights' shape: how many updates there were."""


class OtherWeights(ValueError):
    """Moments of other weights than those that are trained."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(name, where)

    def __str__(self) -> str:
        return (
            f"{self.args[0]} is only {self.args[1]}: go on with the policy and the trainer.lora "
            "that the run began with"
        )


def moments_of(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, keep: bool
) -> Moments:
    """What the optimizer knows of each of the weights, for the rank that wants to `keep` it.

    All ranks together.
    """
    found = {name: gathered(optimizer.state.get(one, {}), keep) for name, one in weights.items()}
    return found if keep else {}


def restore_moments(
    weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, moments: Moments
) -> None:
    """Let an optimizer go on from moments; every rank passes all of them and takes its rows."""
    for name in sorted(moments.keys() ^ weights.keys()):
        raise OtherWeights(name, "in the checkpoint" if name in moments else "in the model")
    for name, one in weights.items():
        own: dict[str, Any] = {}
        for key, value in moments[name].items():
            own[key] = value.clone() if key == COUNT else rows_of(value, one)
        optimizer.state[one] = own

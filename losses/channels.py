"""Channels: sums the three losses of a step into one total.

    total = policy + alpha * sdpo + beta * replay

A channel is off when its weight is 0 or it has no data (None). It is then not part of the graph and
is reported as off, not as 0. Channels are computed and normalized by the caller.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from composer_mesh.losses.reductions import Number

CHANNELS = ("policy", "sdpo", "replay")


@dataclass(frozen=True)
class Composition:
    """The total loss and each channel's own loss.

    A channel's loss is unweighted and detached, and None if the channel is off.
    """

    total: Float[Tensor, ""]
    policy: Float[Tensor, ""] | None
    sdpo: Float[Tensor, ""] | None
    replay: Float[Tensor, ""] | None

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the channels that are part of the total."""
        return tuple(name for name in CHANNELS if getattr(self, name) is not None)

    @property
    def off(self) -> tuple[str, ...]:
        """Names of the channels that are not part of the total."""
        return tuple(name for name in CHANNELS if getattr(self, name) is None)

    def metrics(self) -> dict[str, float | None]:
        """The four `loss/…` metrics of a step; a channel that is off is None."""
        losses: dict[str, float | None] = {"loss/total": self.total.item()}
        for name in CHANNELS:
            loss: Tensor | None = getattr(self, name)
            losses[f"loss/{name}"] = None if loss is None else loss.item()
        return losses


def compose(
    policy: Float[Tensor, ""] | None,
    sdpo: Float[Tensor, ""] | None,
    replay: Float[Tensor, ""] | None,
    *,
    alpha: Number,
    beta: Number,
) -> Composition:
    """Sum the channels that are on; without any, the total is a 0 that can be differentiated."""
    sdpo = sdpo if _weight("alpha", alpha) > 0 else None
    replay = replay if _weight("beta", beta) > 0 else None
    weighted = [(1.0, policy), (alpha, sdpo), (beta, replay)]
    on = [weight * loss for weight, loss in weighted if loss is not None]
    total = sum(on[1:], start=on[0]) if on else torch.zeros((), requires_grad=True)
    return Composition(total, _detached(policy), _detached(sdpo), _detached(replay))


def _detached(loss: Float[Tensor, ""] | None) -> Float[Tensor, ""] | None:
    return None if loss is None else loss.detach()


def _weight(name: str, value: Number) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name} is {value} but a channel's weight has to be finite and >= 0:"
            f" set {name} to 0 to switch the channel off"
        )
    return float(value)

"""The loss of a step from those of its channels: one function, which every kind of step calls.

    total = sum over channels of weight * loss

The trainer, the verification harness, TRL, verl, AReaL and clients of a server pass the terms that
take part; each is divided by its channel's own normalizer over the whole step, so that
microbatches and ranks add up. What is off is not part of the graph, and is reported as off, not 0.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.losses.reductions import Number

POLICY = "policy"
"""The channel of weight 1, with which losses of no channel are counted."""

Term = Callable[[], Tensor | None]
"""Computes a channel's loss of some data, unweighted; None where the channel has no data."""
Figures = dict[str, float]


@dataclass
class StepLoss:
    """The losses of some data of a step, by channel; a channel without data has no entry.

    `losses` are unweighted and detached, `weighted` are those that are summed. `others` belong to
    no channel, such as the balance of a mixture's experts.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    weighted: dict[str, Tensor] = field(default_factory=dict)
    others: Sequence[Tensor] = ()

    def total(self) -> Tensor:
        """Return the sum of all; without any, a 0 that can be differentiated."""
        return _sum([*self.others, *self.weighted.values()])

    def by_channel(self) -> dict[str, Tensor]:
        """Return the weighted loss of each channel, with the `others` in that of the policy."""
        policy = [*self.others, *(one for name, one in self.weighted.items() if name == POLICY)]
        return ({POLICY: _sum(policy)} if policy else {}) | {
            name: loss for name, loss in self.weighted.items() if name != POLICY
        }


def step_loss(
    terms: Mapping[str, Term], weights: Mapping[str, Number], others: Sequence[Tensor] = ()
) -> StepLoss:
    """Compute the terms in their order, and weight them; a channel without a weight has 1.

    Raises ValueError for a weight that is not finite, or below 0.
    """
    found = StepLoss(others=others)
    for name, term in terms.items():
        weight = checked_weight(name, weights.get(name, 1.0))
        loss = term()
        if loss is not None:
            found.losses[name], found.weighted[name] = loss.detach(), weight * loss
    return found


def own_weights(alpha: Number, beta: Number) -> dict[str, Number]:
    """Return the weights of our three channels by name."""
    return {POLICY: 1.0, "sdpo": alpha, "replay": beta}


def checked_weight(name: str, weight: Number) -> float:
    """Return a channel's weight; raise ValueError unless it is finite and >= 0."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(
            f"the weight of {name} is {weight} but must be finite and >= 0: set it to 0 to "
            "switch the channel off"
        )
    return float(weight)


def step_total(losses: Mapping[str, float], weights: Mapping[str, Number]) -> float:
    """Return the weighted sum of a step's losses, over the channels that have a weight."""
    return sum((weights[name] * losses.get(name, 0.0) for name in weights), start=0.0)


def step_metrics(
    losses: Mapping[str, float], weights: Mapping[str, float]
) -> dict[str, float | None]:
    """Return `loss/total`, and `loss/…` of each channel that has a weight; None if it is off."""
    on = {n: losses[n] for n, weight in weights.items() if weight > 0 and n in losses}
    total = step_total(on, weights)
    return {"loss/total": total, **{f"loss/{name}": on.get(name) for name in weights}}


@dataclass
class RunningSums:
    """Sums over microbatches, numbers or float64 tensors; a channel without data has no entry.

    Tensors stay on their device until `read`, so that no microbatch waits for the one before.
    """

    losses: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=lambda: defaultdict(float))

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Add the losses of some data to those of their channels."""
        for channel, loss in losses.items():
            self.losses[channel] = self.losses.get(channel, 0.0) + unread(loss)

    def read(self) -> "StepSums":
        """Return the sums as numbers; waits for the device."""
        figures = defaultdict(float, {name: float(one) for name, one in self.figures.items()})
        return StepSums({name: float(one) for name, one in self.losses.items()}, figures)


def unread(value: Tensor) -> Tensor:
    """Return a number for `RunningSums`, without a gradient and without waiting for it."""
    return value.detach().double()


@dataclass
class StepSums:
    """Sums over the microbatches of a step; a channel without data has no entry."""

    losses: Figures = field(default_factory=dict)
    figures: Figures = field(default_factory=lambda: defaultdict(float))

    @classmethod
    def of_ranks(cls, parts: Sequence["StepSums"]) -> "StepSums":
        """Return the sums over all ranks, added in rank order."""
        total = cls()
        for part in parts:
            for channel, loss in part.losses.items():
                total.losses[channel] = total.losses.get(channel, 0.0) + loss
            for name, figure in part.figures.items():
                total.figures[name] += figure
        return total

    @classmethod
    def of_updates(cls, parts: Sequence["StepSums"]) -> "StepSums":
        """Return the means over a step's updates, each over those that have it; tokens add up."""
        total = cls()
        for name in dict.fromkeys(name for part in parts for name in part.losses):
            losses = [part.losses[name] for part in parts if name in part.losses]
            total.losses[name] = sum(losses) / len(losses)
        for name in dict.fromkeys(name for part in parts for name in part.figures):
            figures = [part.figures[name] for part in parts if name in part.figures]
            total.figures[name] = sum(figures) / (1 if name.startswith("tokens/") else len(figures))
        return total

    def metrics(self, weights: Mapping[str, float]) -> dict[str, float | None]:
        """Return the step's `loss/…` metrics, then its other metrics by name."""
        return {**step_metrics(self.losses, weights), **dict(sorted(self.figures.items()))}


def _sum(losses: Sequence[Tensor]) -> Tensor:
    return sum(losses[1:], start=losses[0]) if losses else torch.zeros((), requires_grad=True)

"""Sums over the microbatches of a step: the channels' losses and other metrics."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from composer_mesh.losses.composition import CHANNELS, compose

Figures = dict[str, float]


def new_figures() -> Figures:
    """Return empty sums of metrics over the microbatches of a step."""
    return defaultdict(float)


@dataclass
class StepSums:
    """Running sums over the microbatches of one step; a channel without data has no entry."""

    losses: dict[str, float] = field(default_factory=dict)
    figures: Figures = field(default_factory=new_figures)

    def add(self, channel: str, loss: Tensor) -> None:
        """Add a microbatch's loss to its channel's sum."""
        self.losses[channel] = self.losses.get(channel, 0.0) + loss.detach().double().item()

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

    def metrics(self, alpha: float, beta: float) -> dict[str, float | None]:
        """Return the step's `loss/…` metrics, then its other metrics by name."""
        losses = {
            name: torch.tensor(self.losses[name], dtype=torch.float64)
            for name in CHANNELS
            if name in self.losses
        }
        total = compose(*(losses.get(name) for name in CHANNELS), alpha=alpha, beta=beta)
        return {**total.metrics(), **dict(sorted(self.figures.items()))}

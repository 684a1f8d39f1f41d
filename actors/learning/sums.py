"""What the microbatches of a step add up to: losses of the channels, and figures beside them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from composer_mesh.losses.composition import CHANNELS, compose

Figures = dict[str, float]


def new_figures() -> Figures:
    """Sums of figures over the microbatches of a step."""
    return defaultdict(float)


@dataclass
class StepSums:
    """Running sums over the microbatches of one step; a channel without data has none."""

    losses: dict[str, float] = field(default_factory=dict)
    figures: Figures = field(default_factory=new_figures)

    def add(self, channel: str, loss: Tensor) -> None:
        """Add a microbatch's loss to its channel's."""
        self.losses[channel] = self.losses.get(channel, 0.0) + loss.detach().double().item()

    @classmethod
    def of_ranks(cls, parts: Sequence["StepSums"]) -> "StepSums":
        """The sums of all ranks, in their order."""
        total = cls()
        for part in parts:
            for channel, loss in part.losses.items():
                total.losses[channel] = total.losses.get(channel, 0.0) + loss
            for name, figure in part.figures.items():
                total.figures[name] += figure
        return total

    def metrics(self, alpha: float, beta: float) -> dict[str, float | None]:
        """The step's `loss/…`, then its figures by name."""
        losses = {
            name: torch.tensor(self.losses[name], dtype=torch.float64)
            for name in CHANNELS
            if name in self.losses
        }
        total = compose(*(losses.get(name) for name in CHANNELS), alpha=alpha, beta=beta)
        return {**total.metrics(), **dict(sorted(self.figures.items()))}

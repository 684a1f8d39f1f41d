"""How the weight of a channel in the total changes over a run."""

from typing import Literal, Self

from pydantic import model_validator

from composer_mesh.configs.base import CountOrZero, Section, Share

Decay = Literal["constant", "linear", "cosine"]
"""How a value decays from its peak to the end of the run."""


class ChannelSchedule(Section):
    """A channel's weight over the steps of a run: it warms up to its peak, and then decays."""

    decay: Decay = "constant"
    """Decay of the weight from its peak to the end of the run."""

    warmup_steps: CountOrZero = 0
    """Steps over which the weight rises from 0 to its peak."""

    min_ratio: Share = 0.0
    """Final weight as a share of the peak."""

    @model_validator(mode="after")
    def _weight_falls_only_with_a_decay(self) -> Self:
        if self.min_ratio and self.decay == "constant":
            raise ValueError(
                f"min_ratio is {self.min_ratio} but decay is 'constant', which never falls: set "
                "decay to 'linear' or 'cosine'"
            )
        return self

"""How the weight of a channel in the total changes over a run."""

from typing import Literal, Self

from pydantic import model_validator

from composer_mesh.configs.base import CountOrZero, Section, Share

Decay = Literal["constant", "linear", "cosine"]
"""How a value decays from its peak to the end of the run."""


class ChannelSchedule(Section):
    """A channel's weight over a run: it warms up to its peak, and then decays."""

    decay: Decay = "constant"
    """Decay of the weight from its peak to the end of the run, or to `end` of what it follows."""

    by: Literal["steps", "success", "agreement"] = "steps"
    """What the decay follows. "steps": those of the run; "success": the running share of rollouts
    that succeed; "agreement": the running share of queried states at which the teachers' majority
    does what the student did."""

    start: Share = 0.0
    """Success or agreement from which on the weight falls."""

    end: Share = 1.0
    """Success or agreement at which the weight has reached min_ratio."""

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

    @model_validator(mode="after")
    def _what_it_follows_has_a_range(self) -> Self:
        if self.by == "steps" and (self.start, self.end) != (0.0, 1.0):
            raise ValueError(
                f"start is {self.start} and end is {self.end} but by is 'steps', which reads "
                "neither: set by to 'success' or 'agreement', or remove both"
            )
        if self.by != "steps" and self.decay == "constant":
            raise ValueError(
                f"by is {self.by!r} but decay is 'constant', which never falls: set decay to "
                "'linear' or 'cosine'"
            )
        if self.start >= self.end:
            raise ValueError(
                f"start is {self.start} but end is {self.end}, and the weight falls between them: "
                "set start below end"
            )
        return self

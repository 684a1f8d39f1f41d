"""What every channel but the policy's has, and the sections of channels that are not ours.

A weight over the run, and bounds of its share.

How the weight of a channel in the total changes over a run.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from composer_mesh.configs.base import CountOrZero, CustomFunction, NotNegative, Section, Share

Decay = Literal["constant", "linear", "cosine"]
"""How a value decays from its peak to the end of the run."""


class ChannelSchedule(Section):
    """A channel's weight over a run: it warms up to its peak, and then decays."""

    decay: Decay = "constant"
    """Decay of the weight from its peak to the end of the run, or to `end` of what it follows."""

    by: Literal["steps", "success", "agreement"] = "steps"
    """What the decay follows. "steps": the run's steps; "success": the running share of rollouts
    that succeed; "agreement": the running share of queried states at which the teachers' majority
    and the student agree."""

    start: Share = 0.0
    """Success or agreement from which on the weight falls."""

    end: Share = 1.0
    """Success or agreement at which the weight has reached min_ratio."""

    warmup_steps: CountOrZero = 0
    """Steps over which the weight rises from 0 to its peak."""

    min_ratio: Share = 0.0
    """Final weight as a share of the peak."""

    def _problems(self) -> Iterator[str]:
        if self.min_ratio and self.decay == "constant":
            yield (
                f"min_ratio is {self.min_ratio} but decay is 'constant', which never falls: set "
                "decay to 'linear' or 'cosine'"
            )
        if self.by == "steps" and (self.start, self.end) != (0.0, 1.0):
            yield (
                f"start is {self.start} and end is {self.end} but by is 'steps', which reads "
                "neither: set by to 'success' or 'agreement', or remove both"
            )
        if self.by != "steps" and self.decay == "constant":
            yield (
                f"by is {self.by!r} but decay is 'constant', which never falls: set decay to "
                "'linear' or 'cosine'"
            )
        if self.start >= self.end:
            yield (
                f"start is {self.start} but end is {self.end}, and the weight falls between them: "
                "set start below end"
            )


UpperShare = Annotated[float, Field(gt=0, le=1)]
LowerShare = Annotated[float, Field(ge=0, lt=1)]


class UpdateShare(Section):
    """The share of an update that a channel may take.

    A share is the norm of the channel's gradient over the sum of all channels' norms. Bounds
    measure every update, which then has a backward for each channel. Where a schedule lowers the
    channel's weight, its bounds are lowered by the same factor.
    """

    min_update_share: LowerShare | None = None
    """Share to which the channel's gradient is raised if it is smaller."""

    max_update_share: UpperShare | None = None
    """Share to which the channel's gradient is lowered if it is larger."""

    @property
    def is_bounded(self) -> bool:
        """Whether the channel's share has a bound."""
        return self.min_update_share is not None or self.max_update_share is not None

    def _problems(self) -> Iterator[str]:
        low, high = self.min_update_share, self.max_update_share
        if low is not None and high is not None and low > high:
            yield (
                f"min_update_share is {low} but max_update_share is {high}, so no share is within "
                "both: lower the first or raise the second"
            )


class ChannelSection(UpdateShare):
    """The section of a channel that is added to the policy's.

    `weight_key` is the key of its weight in the total, at its peak; the schedule is the same with
    `_schedule`.
    """

    weight_key: ClassVar[str]

    @property
    def peak(self) -> float:
        """Weight of the loss in the total, at its peak."""
        return getattr(self, self.weight_key)

    @property
    def schedule(self) -> ChannelSchedule:
        """How the weight changes over the run."""
        return getattr(self, f"{self.weight_key}_schedule")

    @property
    def on(self) -> bool:
        """Whether the channel is active in the run."""
        return self.peak > 0

    @property
    def has_own_update(self) -> bool:
        """Whether the channel has an update and an optimizer of its own."""
        return False


class SeparableChannel(ChannelSection):
    """The section of a channel that may have an update of its own."""

    update: Literal["shared", "own"] = "shared"
    """Which update of the weights the channel is part of. "shared": that of all channels, with one
    clip; "own": a second one, by its own optimizer with the same settings. The rate of its own
    update follows the schedule of the channel's weight."""

    @property
    def has_own_update(self) -> bool:
        """Whether the channel has an update and an optimizer of its own."""
        return self.on and self.update == "own"

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.update == "own" and self.is_bounded:
            yield (
                "update is 'own' but min_update_share or max_update_share is set, and the "
                "channel's gradient is all of that update: remove it, or set update to 'shared'"
            )


class ChannelConfig(CustomFunction, SeparableChannel):
    """A channel that is not ours: its class by import path, its weight and its share."""

    weight_key: ClassVar[str] = "weight"

    weight: NotNegative = 0.0
    """Weight of the channel's loss in the total; 0 turns the channel off."""

    weight_schedule: ChannelSchedule = Field(default_factory=ChannelSchedule)
    """How the weight changes over the run; weight is its peak."""


def _of_no_own_metric(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"{name!r} is what metrics of ours begin with: give it another name")
    return name


RESERVED = (
    *("policy", "sdpo", "replay", "total", "tokens", "update", "running", "rollouts", "reward"),
    *("lag", "time", "moe", "logprob_mismatch", "judges", "eval", "hints", "loss"),
)
"""Names that no other channel can have."""
ChannelName = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40), AfterValidator(_of_no_own_metric)
]
ForeignChannels = Annotated[dict[ChannelName, ChannelConfig], Field(max_length=16)]
"""Channels that are not ours, by name."""

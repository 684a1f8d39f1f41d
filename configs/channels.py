"""What every channel but the policy's has, and the sections of channels that are not ours.

A weight over the run, and bounds of its share.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from composer_mesh.configs.base import CustomFunction, NotNegative, Section
from composer_mesh.configs.channel_schedule import ChannelSchedule

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

    @model_validator(mode="after")
    def _a_share_is_possible(self) -> Self:
        low, high = self.min_update_share, self.max_update_share
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_update_share is {low} but max_update_share is {high}, so no share is within "
                "both: lower the first or raise the second"
            )
        return self


class ChannelSection(UpdateShare):
    """The section of a channel that is added to the policy's.

    `weight_key` is the key of its weight in the total, at its peak; the schedule is the same with
    `_schedule`.
    """

    weight_key: ClassVar[str]

    @property
    def peak(self) -> float:
        """Weight of the loss in the total, at its peak."""
        weight: float = getattr(self, self.weight_key)
        return weight

    @property
    def schedule(self) -> ChannelSchedule:
        """How the weight changes over the run."""
        found: ChannelSchedule = getattr(self, f"{self.weight_key}_schedule")
        return found

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
    clip; "own": one after it, by an optimizer of its own with the same settings, whose rate follows
    the schedule of the channel's weight."""

    @property
    def has_own_update(self) -> bool:
        """Whether the channel has an update and an optimizer of its own."""
        return self.on and self.update == "own"

    @model_validator(mode="after")
    def _an_own_update_has_no_shares(self) -> Self:
        if self.update == "own" and self.is_bounded:
            raise ValueError(
                "update is 'own' but min_update_share or max_update_share is set, and the "
                "channel's gradient is all of that update: remove it, or set update to 'shared'"
            )
        return self


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

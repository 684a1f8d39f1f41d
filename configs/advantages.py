"""The policy channel's advantages, and the length penalties on rewards before them.

Each type has its own section with its options; `type` selects it. The options are explained at the
functions of `losses.advantages`.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from composer_mesh.configs.base import CustomFunction, NotNegative, Section, Share, Tokens, by_type


class NoLengthPenalty(Section):
    """Rewards without a length penalty."""

    type: Literal["none"] = "none"
    """Type of the length penalty."""


class OverlongPenalty(Section):
    """DAPO's soft penalty for rollouts near the length limit."""

    type: Literal["overlong"]
    """Type of the length penalty."""

    max_length: Tokens
    """Sampled tokens of a rollout at which the full penalty applies."""

    buffer: Tokens
    """Tokens before max_length over which the penalty grows."""

    factor: NotNegative = 1.0
    """The full penalty."""

    def _problems(self) -> Iterator[str]:
        if self.buffer > self.max_length:
            yield (
                f"buffer is {self.buffer} but max_length is {self.max_length}: lower buffer to at "
                "most that"
            )


class KimiLengthPenalty(Section):
    """Kimi k1.5's reward for rollouts shorter than the others of the group."""

    type: Literal["kimi"]
    """Type of the length penalty."""

    weight: NotNegative = 1.0
    """Factor of the length reward, which is between -1/2 and 1/2."""


class RelativeLengthPenalty(Section):
    """PRIME-RL's penalty relative to the group's longest rollout."""

    type: Literal["relative"]
    """Type of the length penalty."""

    weight: NotNegative = 0.1
    """Fraction of the group's mean reward that its longest rollout loses."""


class GrpoLeadLengthPenalty(Section):
    """GRPO-LEAD's reward for successful rollouts shorter than the group's other successes."""

    type: Literal["grpo_lead"]
    """Type of the length penalty."""

    alpha: NotNegative = 0.05
    """Decay of a success's reward with each standard deviation of length above the mean."""


LengthPenalty = Annotated[
    Annotated[NoLengthPenalty, Tag("none")]
    | Annotated[OverlongPenalty, Tag("overlong")]
    | Annotated[KimiLengthPenalty, Tag("kimi")]
    | Annotated[RelativeLengthPenalty, Tag("relative")]
    | Annotated[GrpoLeadLengthPenalty, Tag("grpo_lead")],
    Discriminator(by_type("none")),
]


class _Advantage(Section):
    """Options of all built-in advantages."""

    length_penalty: LengthPenalty = Field(default_factory=NoLengthPenalty)
    """Penalty subtracted from the rewards of long rollouts before advantages are computed."""


class _ScaledAdvantage(_Advantage):
    """Options of advantages that are divided by a standard deviation."""

    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation to divide by: that of the compared rewards, that of the step, or none (Dr.
    GRPO). Rewards are compared within the group (GRPO) or a part of it."""

    std: Literal["unbiased", "population"] = "unbiased"
    """Convention of the standard deviation."""

    eps: NotNegative = 1e-4
    """Added to the standard deviation."""


class GroupAdvantage(_ScaledAdvantage):
    """Rewards minus their group's mean, divided by a standard deviation."""

    type: Literal["group"] = "group"
    """Type of the advantage estimator."""


class RlooAdvantage(_Advantage):
    """Rewards minus the mean of the other rollouts of their group."""

    type: Literal["rloo"]
    """Type of the advantage estimator."""


class MaxRlAdvantage(_Advantage):
    """Rewards minus their group's mean, divided by that mean."""

    type: Literal["max_rl"]
    """Type of the advantage estimator."""


class ReinforcePlusPlusAdvantage(_Advantage):
    """Rewards whitened over all sampled tokens of the step."""

    type: Literal["reinforce_plus_plus"]
    """Type of the advantage estimator."""

    baseline: bool = True
    """Whether to subtract the group's mean first."""


class OpoAdvantage(_Advantage):
    """Rewards minus the mean of their group weighted by sampled tokens."""

    type: Literal["opo"]
    """Type of the advantage estimator."""


class GpgAdvantage(_Advantage):
    """Rewards minus their group's mean, scaled by the number of rollouts over rewarded rollouts."""

    type: Literal["gpg"]
    """Type of the advantage estimator."""


class TurnReturnsAdvantage(_ScaledAdvantage):
    """Discounted rewards still to come at each turn, minus their mean over the compared turns."""

    type: Literal["turn_returns"]
    """Type of the advantage estimator."""

    gamma: Share = 1.0
    """Discount from turn to turn."""

    baseline: Literal["turn", "group"] = "turn"
    """"turn": compare with the same turn of the group's rollouts; "group": with all their turns."""


class MtGrpoAdvantage(_ScaledAdvantage):
    """MT-GRPO: a turn's own reward and the rollout's outcome, each relative to the group."""

    type: Literal["mt_grpo"]
    """Type of the advantage estimator."""

    outcome_weight: NotNegative = 1.0
    """Weight of the outcome before the last turn, where it is 1."""


class GigpoAdvantage(_ScaledAdvantage):
    """GiGPO: the rollout's reward relative to the group. Also the reward still to come at a turn,
    relative to the group's turns from the same state."""

    type: Literal["gigpo"]
    """Type of the advantage estimator."""

    gamma: Share = 0.95
    """Discount from turn to turn."""

    step_weight: NotNegative = 1.0
    """Weight of the second part."""

    state: Literal["observation", "history"] = "observation"
    """When two states are equal: what the agent read since its last action, or all that it has read
    and said."""


class CustomAdvantage(CustomFunction):
    """A user-defined function, called with the step's groups of rollouts."""

    type: Literal["custom"]
    """Type of the advantage estimator."""


AdvantageConfig = Annotated[
    Annotated[GroupAdvantage, Tag("group")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[MaxRlAdvantage, Tag("max_rl")]
    | Annotated[OpoAdvantage, Tag("opo")]
    | Annotated[GpgAdvantage, Tag("gpg")]
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[TurnReturnsAdvantage, Tag("turn_returns")]
    | Annotated[MtGrpoAdvantage, Tag("mt_grpo")]
    | Annotated[GigpoAdvantage, Tag("gigpo")]
    | Annotated[CustomAdvantage, Tag("custom")],
    Discriminator(by_type("group")),
]

TURN_ADVANTAGES = (TurnReturnsAdvantage, MtGrpoAdvantage, GigpoAdvantage)
"""Types that give each turn an advantage of its own."""

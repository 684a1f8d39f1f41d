"""The policy channel: which loss trains on rewards, and how rewards become advantages.

Each type of loss is a section of its own with just the options it has; `type` names it. What the
options mean is written at the functions of `losses.policy` and `losses.advantages`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from composer_mesh.configs.base import Count, NotNegative, Positive, Section, by_type

Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
RatioLevel = Literal["token", "sequence", "sequence_token"]
ImportPath = Annotated[str, Field(min_length=1)]


class _Loss(Section):
    """What every loss can be asked."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return False


class _BuiltInLoss(_Loss):
    """What all losses but a custom one have in common."""

    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, the mean entropy of the step's sampled tokens in nats."""


class _CorrectedLoss(_BuiltInLoss):
    """What losses have in common whose terms may be weighted by trainer over generator."""

    aggregation: Aggregation = "dapo"
    """How token losses are summed: TRL's loss types."""

    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """Sampler-mismatch correction: tokens are weighted by trainer over generator, and a loss with a
    ratio takes it to the trainer; with "none" it is to the generator's own log-probs."""

    correction_maximum: Positive = 3.0
    """Largest weight of the correction."""

    correction_minimum: Positive | None = None
    """Smallest weight of the correction; not set means none."""

    @model_validator(mode="after")
    def _correction_makes_sense(self) -> Self:
        if self.correction_minimum is None:
            return self
        if self.correction == "none":
            raise ValueError(
                f"correction_minimum is {self.correction_minimum} but correction is 'none', which "
                "has no weights: set correction or remove correction_minimum"
            )
        if self.correction_minimum > self.correction_maximum:
            raise ValueError(
                f"correction_minimum is {self.correction_minimum} but correction_maximum is "
                f"{self.correction_maximum}, so no weight would do: lower correction_minimum"
            )
        return self


class _RatioLoss(_CorrectedLoss):
    """What losses on the ratio of the policy to the one that sampled have in common."""

    ratio_level: RatioLevel = "token"
    """"token": a ratio for each token; "sequence": one for all tokens of a rollout, as in GSPO;
    "sequence_token": the same ratio with a gradient for each token, as in GSPO-token."""

    kl_beta: NotNegative = 0.0
    """Weight of the KL to the frozen initial policy; 0 loads no reference for it."""

    kl_estimator: Literal["k1", "k2", "k3", "abs", "low_var_kl"] = "k3"
    """How the KL is estimated from sampled tokens."""

    kl_importance: bool = False
    """Whether the KL is multiplied by the ratio, which makes the gradient of k3 unbiased."""

    off_policy_threshold: Positive | None = None
    """Mean mismatch of generator and trainer, in nats per token, beyond which a rollout with a
    negative advantage is dropped (DeepSeek-V3.2); not set drops none."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return self.kl_beta > 0

    @model_validator(mode="after")
    def _kl_options_have_an_effect(self) -> Self:
        for name, default in (("kl_importance", False), ("kl_estimator", "k3")):
            if self.kl_beta == 0 and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is {str(getattr(self, name)).lower()} but kl_beta is 0, so there is "
                    f"no KL for it: set kl_beta above 0 or remove {name}"
                )
        return self


class GrpoLoss(_RatioLoss):
    """GRPO's clipped surrogate, with DAPO's, Dr. GRPO's and GSPO's options."""

    type: Literal["grpo"] = "grpo"
    """The loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far a ratio may fall below 1."""

    clip_high: Positive = 0.28
    """How far a ratio may rise above 1."""

    ratio_cap: Positive | None = None
    """Bound of the unclipped ratio (TRL's delta); not set means none."""

    @model_validator(mode="after")
    def _cap_lies_above_the_clip(self) -> Self:
        if self.ratio_cap is not None and self.ratio_cap <= 1 + self.clip_high:
            raise ValueError(
                f"ratio_cap is {self.ratio_cap} but clip_high lets ratios grow to "
                f"{1 + self.clip_high:g}: raise ratio_cap above that"
            )
        return self


class CispoLoss(_RatioLoss):
    """CISPO: REINFORCE weighted by a capped, constant ratio."""

    type: Literal["cispo"]
    """The loss."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How far a ratio may fall below 1; 1 is no lower bound."""

    clip_high: Positive = 4.0
    """How far a ratio may rise above 1."""


class SapoLoss(_RatioLoss):
    """SAPO: a soft gate on the ratio instead of a clip."""

    type: Literal["sapo"]
    """The loss."""

    aggregation: Aggregation = "grpo"
    """How token losses are summed: TRL's loss types."""

    tau_positive: Positive = 1.0
    """Steepness of the gate where the advantage is positive."""

    tau_negative: Positive = 1.05
    """Steepness of the gate elsewhere."""


class GmpoLoss(_CorrectedLoss):
    """GMPO: the geometric mean of a rollout's token ratios, each clipped."""

    type: Literal["gmpo"]
    """The loss."""

    aggregation: Aggregation = "grpo"
    """How token losses are summed: TRL's loss types."""

    log_clip_low: Positive = 0.4
    """How far a log-ratio may fall below 0 where the advantage is negative."""

    log_clip_high: Positive = 0.4
    """How far a log-ratio may rise above 0 where the advantage is positive."""


class VespoLoss(_CorrectedLoss):
    """VESPO: REINFORCE with a smooth weight of a rollout's whole importance ratio."""

    type: Literal["vespo"]
    """The loss."""

    k_positive: NotNegative = 2.0
    """Power of the ratio where the advantage is not negative."""

    lambda_positive: NotNegative = 3.0
    """Exponential decay in the ratio where the advantage is not negative."""

    k_negative: NotNegative = 3.0
    """Power of the ratio where the advantage is negative."""

    lambda_negative: NotNegative = 2.0
    """Exponential decay in the ratio where the advantage is negative."""

    @model_validator(mode="after")
    def _correction_is_of_tokens(self) -> Self:
        if self.correction.startswith("sequence"):
            raise ValueError(
                f"correction is {self.correction!r} but vespo multiplies the weights of the "
                "tokens itself: use 'token_truncate', 'token_mask' or 'none'"
            )
        return self


class PrimeRlLoss(_BuiltInLoss):
    """PRIME-RL's default: tokens whose probability moved too far are masked, and a squared KL."""

    type: Literal["prime_rl"]
    """The loss."""

    mask_low: NotNegative = 0.2
    """Largest fall of a token's probability, where its advantage is not positive."""

    mask_high: NotNegative = 0.2
    """Largest rise of a token's probability, where its advantage is positive."""

    adv_tau: NotNegative = 1.0
    """Weight of the policy gradient."""

    kl_tau: NotNegative = 1e-3
    """Weight of the squared log-ratio."""

    teacher_tau: NotNegative = 0.0
    """Weight of the reverse KL to the frozen initial policy as an advantage of each token; 0 loads
    no reference for it."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return self.teacher_tau > 0


class PrimeRlIpoLoss(_BuiltInLoss):
    """PRIME-RL's loss type ipo: tokens whose probability moved too far either way are masked."""

    type: Literal["prime_rl_ipo"]
    """The loss."""

    threshold: Positive = 0.1
    """Largest move of a token's probability."""

    adv_tau: NotNegative = 1.0
    """Weight of the policy gradient."""

    kl_tau: NotNegative = 1e-3
    """Weight of the squared log-ratio."""


class DppoLoss(_BuiltInLoss):
    """DPPO: tokens outside a trust region by total variation, KL or ratio are masked."""

    type: Literal["dppo"]
    """The loss."""

    aggregation: Aggregation = "dapo"
    """How token losses are summed: TRL's loss types."""

    divergence: Literal["tv", "kl", "ratio"] = "tv"
    """Binary total variation, binary KL, or the distance of the ratio from 1 as in PPO."""

    threshold: Positive | None = None
    """Largest divergence of a token; 0.15 for tv, 0.05 for kl and 0.2 for ratio where not set."""

    threshold_high: Positive | None = None
    """The same where the advantage is positive; threshold where not set."""

    ratio_cap: Positive = 10.0
    """Largest weight of a token."""


class RejectionConfig(Section):
    """AReaL's rejection by trainer over generator; the default drops tokens weighted above 5."""

    level: Literal["token", "sequence"] = "token"
    """Whether tokens are judged alone or all tokens of a rollout together."""

    action: Literal["mask", "clamp"] = "mask"
    """"mask": drop what is outside; "clamp": bound its weight."""

    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    """What is compared with the bounds."""

    agg: Literal["sum", "mean", "max"] = "mean"
    """How the tokens of a rollout are judged together."""

    upper: float = 5.0
    """Upper bound; above 0, but for kl_k1, which has a sign."""

    lower: float | None = None
    """Lower bound; not set means none."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(
                f"action is 'clamp' but metric is {self.metric!r}, and only a ratio is a weight "
                "that can be bounded: set metric to 'ratio' or action to 'mask'"
            )
        if self.metric != "kl_k1" and self.upper <= 0:
            raise ValueError(
                f"upper is {self.upper} but metric {self.metric!r} is never below 0, so nothing "
                "would be left: raise upper above 0"
            )
        if self.metric == "ratio" and self.lower is not None and self.lower <= 0:
            raise ValueError(
                f"lower is {self.lower} but ratios are above 0: raise it, or remove it for no bound"
            )
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(
                f"lower is {self.lower} but upper is {self.upper}, so nothing would be left: "
                "lower it below upper"
            )
        return self


class DecoupledPpoLoss(_BuiltInLoss):
    """AReaL's decoupled PPO: clipped against the trainer, weighted against the generator."""

    type: Literal["decoupled_ppo"]
    """The loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """How far a ratio may fall below 1."""

    clip_high: Positive = 0.2
    """How far a ratio may rise above 1."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the loss where the advantage is negative; not set means none."""

    ratio_level: RatioLevel = "token"
    """"token": a ratio for each token; "sequence": one for all tokens of a rollout;
    "sequence_token": the same ratio with a gradient for each token."""

    rejection: RejectionConfig = Field(default_factory=RejectionConfig)
    """Which tokens the trainer's weight over the generator drops or bounds."""


class ReinforceLoss(_CorrectedLoss):
    """REINFORCE: advantage times log-prob, for runs without lag or with a correction."""

    type: Literal["reinforce"]
    """The loss."""


class CustomLoss(_Loss):
    """A function of yours, called once for each rollout with PRIME-RL's fields."""

    type: Literal["custom"]
    """The loss."""

    import_path: ImportPath
    """Where the function is: my_module.my_loss, looked up in the working directory too."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    reference: bool = False
    """Whether it reads ref_logprobs: the frozen initial policy's."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return self.reference


LossConfig = Annotated[
    Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[VespoLoss, Tag("vespo")]
    | Annotated[PrimeRlLoss, Tag("prime_rl")]
    | Annotated[PrimeRlIpoLoss, Tag("prime_rl_ipo")]
    | Annotated[DppoLoss, Tag("dppo")]
    | Annotated[DecoupledPpoLoss, Tag("decoupled_ppo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[CustomLoss, Tag("custom")],
    Discriminator(by_type("grpo")),
]


class NoLengthPenalty(Section):
    """Rewards as they are."""

    type: Literal["none"] = "none"
    """What a rollout's sampled tokens cost it."""


class OverlongPenalty(Section):
    """DAPO's soft punishment of rollouts near the length limit."""

    type: Literal["overlong"]
    """What a rollout's sampled tokens cost it."""

    max_length: Count
    """Sampled tokens of a rollout at which the whole penalty is due."""

    buffer: Count
    """Tokens before max_length over which the penalty grows."""

    factor: NotNegative = 1.0
    """The whole penalty."""

    @model_validator(mode="after")
    def _buffer_is_within(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer is {self.buffer} but max_length is {self.max_length}: lower buffer to at "
                "most that"
            )
        return self


class KimiLengthPenalty(Section):
    """Kimi k1.5's reward for being shorter than the others of the group."""

    type: Literal["kimi"]
    """What a rollout's sampled tokens cost it."""

    weight: NotNegative = 1.0
    """What the length reward, between -1/2 and 1/2, is multiplied by."""


class RelativeLengthPenalty(Section):
    """PRIME-RL's penalty by the share of the group's longest rollout."""

    type: Literal["relative"]
    """What a rollout's sampled tokens cost it."""

    weight: NotNegative = 0.1
    """Share of the group's mean reward that its longest rollout loses."""


LengthPenalty = Annotated[
    Annotated[NoLengthPenalty, Tag("none")]
    | Annotated[OverlongPenalty, Tag("overlong")]
    | Annotated[KimiLengthPenalty, Tag("kimi")]
    | Annotated[RelativeLengthPenalty, Tag("relative")],
    Discriminator(by_type("none")),
]


class _Advantage(Section):
    """What all advantages computed here from rewards have in common."""

    length_penalty: LengthPenalty = Field(default_factory=NoLengthPenalty)
    """What is taken off the rewards of long rollouts before advantages are computed."""


class GroupAdvantage(_Advantage):
    """Rewards against the mean of their group."""

    type: Literal["group"] = "group"
    """How advantages are computed."""

    scale: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation divides: the group's (GRPO), the step's, or none (Dr. GRPO)."""

    std: Literal["unbiased", "population"] = "unbiased"
    """The standard deviation's convention."""

    eps: NotNegative = 1e-4
    """Added to the standard deviation."""


class RlooAdvantage(_Advantage):
    """Rewards against the mean of the others of their group."""

    type: Literal["rloo"]
    """How advantages are computed."""


class MaxRlAdvantage(_Advantage):
    """Rewards against their group's mean, divided by it."""

    type: Literal["max_rl"]
    """How advantages are computed."""


class ReinforcePlusPlusAdvantage(_Advantage):
    """Rewards whitened over all sampled tokens of the step."""

    type: Literal["reinforce_plus_plus"]
    """How advantages are computed."""

    baseline: bool = True
    """Whether the group's mean is taken off first."""


class OpoAdvantage(_Advantage):
    """Rewards against the mean of their group weighted by sampled tokens."""

    type: Literal["opo"]
    """How advantages are computed."""


class GpgAdvantage(_Advantage):
    """Rewards against the mean of their group, times rollouts over rewarded rollouts."""

    type: Literal["gpg"]
    """How advantages are computed."""


class CustomAdvantage(Section):
    """A function of yours, called with the step's groups of rollouts."""

    type: Literal["custom"]
    """How advantages are computed."""

    import_path: ImportPath
    """Where the function is: my_module.my_advantage, looked up in the working directory too."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


AdvantageConfig = Annotated[
    Annotated[GroupAdvantage, Tag("group")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[MaxRlAdvantage, Tag("max_rl")]
    | Annotated[OpoAdvantage, Tag("opo")]
    | Annotated[GpgAdvantage, Tag("gpg")]
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[CustomAdvantage, Tag("custom")],
    Discriminator(by_type("group")),
]

"""The policy channel: the loss that trains on rewards, and the computation of advantages.

Each loss type has its own section with its options; `type` selects it. The options are explained at
the functions of `losses.policy` and `losses.advantages`.
"""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from composer_mesh.configs.base import (
    LARGEST,
    FreeTable,
    NotNegative,
    Number,
    Positive,
    Section,
    Tokens,
    by_type,
)

Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
RatioLevel = Literal["token", "sequence", "sequence_token"]
ImportPath = Annotated[str, Field(min_length=1)]


class _Loss(Section):
    """Base of all losses."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return False


class _BuiltInLoss(_Loss):
    """Options of all losses but a custom one."""

    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, the mean entropy of the step's sampled tokens in nats."""


class _CorrectedLoss(_BuiltInLoss):
    """Options of losses whose terms may be weighted by the trainer / generator ratio."""

    aggregation: Aggregation = "dapo"
    """Aggregation of token losses: TRL's loss types."""

    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """Sampler-mismatch correction: weights tokens by the trainer / generator ratio, and the loss's
    own ratio is then relative to the trainer's log-probs; with "none", to the generator's."""

    correction_maximum: Positive = 3.0
    """Upper bound of the correction's weight."""

    correction_minimum: Positive | None = None
    """Lower bound of the correction's weight; not set means none."""

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
    """Options of losses on the ratio of the policy to the sampling policy."""

    ratio_level: RatioLevel = "token"
    """"token": a ratio per token; "sequence": one for all tokens of a rollout, as in GSPO;
    "sequence_token": the same ratio with a gradient per token, as in GSPO-token."""

    kl_beta: NotNegative = 0.0
    """Weight of the KL to the frozen initial policy; 0 loads no reference for it."""

    kl_estimator: Literal["k1", "k2", "k3", "abs", "low_var_kl"] = "k3"
    """Estimator of the KL from sampled tokens."""

    kl_importance: bool = False
    """Whether to multiply the KL by the ratio, which makes the gradient of k3 unbiased."""

    off_policy_threshold: Positive | None = None
    """Mean mismatch of generator and trainer, in nats per token, above which a rollout with a
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
    """Type of the loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip bound of the ratio, as a distance from 1."""

    clip_high: Positive = 0.28
    """Upper clip bound of the ratio, as a distance from 1."""

    ratio_cap: Positive | None = None
    """Upper bound of the unclipped ratio (TRL's delta); not set means none."""

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
    """Type of the loss."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Lower bound of the ratio, as a distance from 1; 1 means none."""

    clip_high: Positive = 4.0
    """Upper bound of the ratio, as a distance from 1."""


class SapoLoss(_RatioLoss):
    """SAPO: a soft gate on the ratio instead of a clip."""

    type: Literal["sapo"]
    """Type of the loss."""

    aggregation: Aggregation = "grpo"
    """Aggregation of token losses: TRL's loss types."""

    tau_positive: Positive = 1.0
    """Steepness of the gate for positive advantages."""

    tau_negative: Positive = 1.05
    """Steepness of the gate for other advantages."""


class GmpoLoss(_CorrectedLoss):
    """GMPO: the geometric mean of a rollout's token ratios, each clipped."""

    type: Literal["gmpo"]
    """Type of the loss."""

    aggregation: Aggregation = "grpo"
    """Aggregation of token losses: TRL's loss types."""

    log_clip_low: Positive = 0.4
    """Lower clip bound of the log-ratio, as a distance from 0, for negative advantages."""

    log_clip_high: Positive = 0.4
    """Upper clip bound of the log-ratio, as a distance from 0, for positive advantages."""


class VespoLoss(_CorrectedLoss):
    """VESPO: REINFORCE with a smooth weight of a rollout's sequence-level importance ratio."""

    type: Literal["vespo"]
    """Type of the loss."""

    k_positive: NotNegative = 2.0
    """Exponent of the ratio for non-negative advantages."""

    lambda_positive: NotNegative = 3.0
    """Exponential decay in the ratio for non-negative advantages."""

    k_negative: NotNegative = 3.0
    """Exponent of the ratio for negative advantages."""

    lambda_negative: NotNegative = 2.0
    """Exponential decay in the ratio for negative advantages."""

    @model_validator(mode="after")
    def _correction_is_of_tokens(self) -> Self:
        if self.correction.startswith("sequence"):
            raise ValueError(
                f"correction is {self.correction!r} but vespo multiplies the weights of the "
                "tokens itself: use 'token_truncate', 'token_mask' or 'none'"
            )
        return self


class PrimeRlLoss(_BuiltInLoss):
    """PRIME-RL's default: masks tokens whose probability moved too far, and adds a squared KL."""

    type: Literal["prime_rl"]
    """Type of the loss."""

    mask_low: NotNegative = 0.2
    """Maximum decrease of a token's probability, for non-positive advantages."""

    mask_high: NotNegative = 0.2
    """Maximum increase of a token's probability, for positive advantages."""

    adv_tau: NotNegative = 1.0
    """Weight of the policy gradient."""

    kl_tau: NotNegative = 1e-3
    """Weight of the squared log-ratio."""

    teacher_tau: NotNegative = 0.0
    """Weight of the reverse KL to the frozen initial policy as a per-token advantage; 0 loads no
    reference for it."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return self.teacher_tau > 0


class PrimeRlIpoLoss(_BuiltInLoss):
    """PRIME-RL's loss type ipo: masks tokens whose probability moved too far either way."""

    type: Literal["prime_rl_ipo"]
    """Type of the loss."""

    threshold: Positive = 0.1
    """Maximum change of a token's probability."""

    adv_tau: NotNegative = 1.0
    """Weight of the policy gradient."""

    kl_tau: NotNegative = 1e-3
    """Weight of the squared log-ratio."""


class DppoLoss(_BuiltInLoss):
    """DPPO: masks tokens outside a trust region by total variation, KL or ratio."""

    type: Literal["dppo"]
    """Type of the loss."""

    aggregation: Aggregation = "dapo"
    """Aggregation of token losses: TRL's loss types."""

    divergence: Literal["tv", "kl", "ratio"] = "tv"
    """Binary total variation, binary KL, or the distance of the ratio from 1 as in PPO."""

    threshold: Positive | None = None
    """Maximum divergence of a token; not set means 0.15 for tv, 0.05 for kl and 0.2 for ratio."""

    threshold_high: Positive | None = None
    """Maximum divergence of a token for positive advantages; not set means threshold."""

    ratio_cap: Positive = 10.0
    """Maximum weight of a token."""


class RejectionConfig(Section):
    """AReaL's rejection by the trainer / generator ratio; the default drops tokens above 5."""

    level: Literal["token", "sequence"] = "token"
    """Whether to test tokens individually, or all tokens of a rollout together."""

    action: Literal["mask", "clamp"] = "mask"
    """"mask": drop what is out of bounds; "clamp": clamp its weight."""

    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = "ratio"
    """Quantity compared with the bounds."""

    agg: Literal["sum", "mean", "max"] = "mean"
    """Aggregation over the tokens of a rollout for level "sequence"."""

    upper: Number = 5.0
    """Upper bound; must be above 0, except for kl_k1, which may be negative."""

    lower: Number | None = None
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
    """Type of the loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip bound of the ratio, as a distance from 1."""

    clip_high: Positive = 0.2
    """Upper clip bound of the ratio, as a distance from 1."""

    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None = None
    """Dual-clip bound of the loss for negative advantages; not set means none."""

    ratio_level: RatioLevel = "token"
    """"token": a ratio per token; "sequence": one for all tokens of a rollout; "sequence_token":
    the same ratio with a gradient per token."""

    rejection: RejectionConfig = Field(default_factory=RejectionConfig)
    """Tokens dropped or clamped by their trainer / generator weight."""


class ReinforceLoss(_CorrectedLoss):
    """REINFORCE: advantage times log-prob, for runs without lag or with a correction."""

    type: Literal["reinforce"]
    """Type of the loss."""


class CustomLoss(_Loss):
    """A user-defined function, called once per rollout with PRIME-RL's fields."""

    type: Literal["custom"]
    """Type of the loss."""

    import_path: ImportPath
    """Import path of the function, as my_module.my_loss; the working directory is searched too."""

    kwargs: FreeTable = Field(default_factory=dict)
    """Its keyword arguments."""

    reference: bool = False
    """Whether it reads ref_logprobs, those of the frozen initial policy."""

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

    @model_validator(mode="after")
    def _buffer_is_within(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer is {self.buffer} but max_length is {self.max_length}: lower buffer to at "
                "most that"
            )
        return self


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


LengthPenalty = Annotated[
    Annotated[NoLengthPenalty, Tag("none")]
    | Annotated[OverlongPenalty, Tag("overlong")]
    | Annotated[KimiLengthPenalty, Tag("kimi")]
    | Annotated[RelativeLengthPenalty, Tag("relative")],
    Discriminator(by_type("none")),
]


class _Advantage(Section):
    """Options of all built-in advantages."""

    length_penalty: LengthPenalty = Field(default_factory=NoLengthPenalty)
    """Penalty subtracted from the rewards of long rollouts before advantages are computed."""


class GroupAdvantage(_Advantage):
    """Rewards minus their group's mean, divided by a standard deviation."""

    type: Literal["group"] = "group"
    """Type of the advantage estimator."""

    scale: Literal["group", "batch", "none"] = "group"
    """Standard deviation to divide by: the group's (GRPO), the step's, or none (Dr. GRPO)."""

    std: Literal["unbiased", "population"] = "unbiased"
    """Convention of the standard deviation."""

    eps: NotNegative = 1e-4
    """Added to the standard deviation."""


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


class CustomAdvantage(Section):
    """A user-defined function, called with the step's groups of rollouts."""

    type: Literal["custom"]
    """Type of the advantage estimator."""

    import_path: ImportPath
    """Import path of the function, as my_module.my_advantage; the working directory is searched
    too."""

    kwargs: FreeTable = Field(default_factory=dict)
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

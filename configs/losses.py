"""The policy channel's loss: a section for each `type`, with the options of `losses.policy`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from composer_mesh.configs.base import (
    LARGEST,
    CustomFunction,
    NotNegative,
    Number,
    Positive,
    Section,
    by_type,
)

Aggregation = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]
RatioLevel = Literal["token", "sequence", "sequence_token"]


class Loss(Section):
    """Base of all losses."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return False

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a rollout with advantage 0 may have a gradient."""
        return True

    @property
    def refuses_turn_advantages(self) -> str:
        """The option that allows one advantage per rollout only, with its repair; "" if none."""
        return ""


class BuiltInLoss(Loss):
    """Options of all losses but a custom one."""

    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, the mean entropy of the step's sampled tokens in nats."""

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a rollout with advantage 0 may have a gradient, from another term of the loss.

        `needs_reference` is such a term.
        """
        return self.entropy_coef > 0 or self.needs_reference


class CorrectedLoss(BuiltInLoss):
    """Options of losses whose terms may be weighted by the trainer / generator ratio."""

    aggregation: Aggregation = "dapo"
    """Aggregation of token losses: TRL's loss types."""

    correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """Sampler-mismatch correction: weights tokens by the trainer / generator ratio. The loss's own
    ratio is then relative to the trainer's log-probs, with "none" to the generator's."""

    correction_maximum: Positive = 3.0
    """Upper bound of the correction's weight."""

    correction_minimum: Positive | None = None
    """Lower bound of the correction's weight; not set means none."""

    def _problems(self) -> Iterator[str]:
        least = self.correction_minimum
        if least is not None and self.correction == "none":
            yield (
                f"correction_minimum is {least} but correction is 'none', which has no weights: "
                "set correction or remove correction_minimum"
            )
        if least is not None and least > self.correction_maximum:
            yield (
                f"correction_minimum is {least} but correction_maximum is "
                f"{self.correction_maximum}, so no weight is possible: lower correction_minimum"
            )


class TokenLoss(CorrectedLoss):
    """Options of losses with a separate term for each token."""

    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the step's tokens that have a policy gradient: those with the highest entropy at its
    start (0.2 in arXiv 2506.01939). Below 1 a step takes one more forward."""

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a rollout with advantage 0 may have a gradient, or its entropies matter."""
        return super().trains_zero_advantages or self.top_entropy_quantile < 1


class RatioLoss(TokenLoss):
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

    @property
    def refuses_turn_advantages(self) -> str:
        """The option that allows one advantage per rollout only, with its repair; "" if none."""
        if self.off_policy_threshold is not None:
            return "loss.off_policy_threshold drops whole rollouts by their advantage: remove it"
        return of_whole_rollouts(self.ratio_level)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for name, default in (("kl_importance", False), ("kl_estimator", "k3")):
            if self.kl_beta == 0 and getattr(self, name) != default:
                yield (
                    f"{name} is {str(getattr(self, name)).lower()} but kl_beta is 0, so there is "
                    f"no KL for it: set kl_beta above 0 or remove {name}"
                )


def of_whole_rollouts(ratio_level: RatioLevel) -> str:
    """Return why a ratio level allows one advantage per rollout only; "" if it does not."""
    if ratio_level != "sequence":
        return ""
    return (
        "loss.ratio_level is 'sequence', one ratio and one advantage for a rollout: set it to "
        "'sequence_token' or 'token'"
    )


class GrpoLoss(RatioLoss):
    """GRPO's clipped surrogate, with DAPO's, Dr. GRPO's and GSPO's options."""

    type: Literal["grpo"] = "grpo"
    """Type of the loss."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip bound of the ratio, as a distance from 1."""

    clip_high: Positive = 0.28
    """Upper clip bound of the ratio, as a distance from 1."""

    ratio_cap: Positive | None = None
    """Upper bound of the unclipped ratio (TRL's delta); not set means none."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.ratio_cap is not None and self.ratio_cap <= 1 + self.clip_high:
            yield (
                f"ratio_cap is {self.ratio_cap} but clip_high lets ratios grow to "
                f"{1 + self.clip_high:g}: raise ratio_cap above that"
            )


class CispoLoss(RatioLoss):
    """CISPO: REINFORCE weighted by a capped, constant ratio."""

    type: Literal["cispo"]
    """Type of the loss."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Lower bound of the ratio, as a distance from 1; 1 means none."""

    clip_high: Positive = 4.0
    """Upper bound of the ratio, as a distance from 1."""


class SapoLoss(RatioLoss):
    """SAPO: a soft gate on the ratio instead of a clip."""

    type: Literal["sapo"]
    """Type of the loss."""

    aggregation: Aggregation = "grpo"
    """Aggregation of token losses: TRL's loss types."""

    tau_positive: Positive = 1.0
    """Steepness of the gate for positive advantages."""

    tau_negative: Positive = 1.05
    """Steepness of the gate for other advantages."""


class GmpoLoss(CorrectedLoss):
    """GMPO: the geometric mean of a rollout's token ratios, each clipped."""

    type: Literal["gmpo"]
    """Type of the loss."""

    aggregation: Aggregation = "grpo"
    """Aggregation of token losses: TRL's loss types."""

    log_clip_low: Positive = 0.4
    """Lower clip bound of the log-ratio, as a distance from 0, for negative advantages."""

    log_clip_high: Positive = 0.4
    """Upper clip bound of the log-ratio, as a distance from 0, for positive advantages."""

    @property
    def refuses_turn_advantages(self) -> str:
        """The option that allows one advantage per rollout only, with its repair."""
        return "loss.type 'gmpo' is defined for one advantage per rollout: use 'grpo'"


class VespoLoss(CorrectedLoss):
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

    @property
    def refuses_turn_advantages(self) -> str:
        """The option that allows one advantage per rollout only, with its repair."""
        return "loss.type 'vespo' is defined for one advantage per rollout: use 'grpo'"

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.correction.startswith("sequence"):
            yield (
                f"correction is {self.correction!r} but vespo multiplies the weights of the "
                "tokens itself: use 'token_truncate', 'token_mask' or 'none'"
            )


class SquaredRatioLoss(BuiltInLoss):
    """Options of PRIME-RL's losses, which add a squared log-ratio."""

    adv_tau: NotNegative = 1.0
    """Weight of the policy gradient."""

    kl_tau: NotNegative = 1e-3
    """Weight of the squared log-ratio."""

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether a rollout with advantage 0 may have a gradient: by the squared log-ratio too."""
        return super().trains_zero_advantages or self.kl_tau > 0


class PrimeRlLoss(SquaredRatioLoss):
    """PRIME-RL's default: masks tokens whose probability moved too far, and adds a squared KL."""

    type: Literal["prime_rl"]
    """Type of the loss."""

    mask_low: NotNegative = 0.2
    """Maximum decrease of a token's probability, for non-positive advantages."""

    mask_high: NotNegative = 0.2
    """Maximum increase of a token's probability, for positive advantages."""

    teacher_tau: NotNegative = 0.0
    """Weight of the reverse KL to the frozen initial policy as a per-token advantage; 0 loads no
    reference for it."""

    @property
    def needs_reference(self) -> bool:
        """Whether it reads the log-probs of the frozen initial policy."""
        return self.teacher_tau > 0


class PrimeRlIpoLoss(SquaredRatioLoss):
    """PRIME-RL's loss type ipo: masks tokens whose probability moved too far either way."""

    type: Literal["prime_rl_ipo"]
    """Type of the loss."""

    threshold: Positive = 0.1
    """Maximum change of a token's probability."""


class DppoLoss(BuiltInLoss):
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

    def _problems(self) -> Iterator[str]:
        if self.action == "clamp" and self.metric != "ratio":
            yield (
                f"action is 'clamp' but metric is {self.metric!r}, and only a ratio is a weight "
                "that can be bounded: set metric to 'ratio' or action to 'mask'"
            )
        if self.metric != "kl_k1" and self.upper <= 0:
            yield (
                f"upper is {self.upper} but metric {self.metric!r} is never below 0, so no token "
                "would remain: raise upper above 0"
            )
        if self.metric == "ratio" and self.lower is not None and self.lower <= 0:
            yield (
                f"lower is {self.lower} but ratios are above 0: raise it, or remove it for no bound"
            )
        if self.lower is not None and self.lower > self.upper:
            yield (
                f"lower is {self.lower} but upper is {self.upper}, so no token would remain: "
                "lower it below upper"
            )


class DecoupledPpoLoss(BuiltInLoss):
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

    @property
    def refuses_turn_advantages(self) -> str:
        """The option that allows one advantage per rollout only, with its repair; "" if none."""
        return of_whole_rollouts(self.ratio_level)


class ReinforceLoss(TokenLoss):
    """REINFORCE: advantage times log-prob, for runs without lag or with a correction."""

    type: Literal["reinforce"]
    """Type of the loss."""


class CustomLoss(CustomFunction, Loss):
    """A user-defined function, called once per rollout with PRIME-RL's fields."""

    type: Literal["custom"]
    """Type of the loss."""

    reference: bool = False
    """Whether the function reads ref_logprobs, those of the frozen initial policy."""

    needs: Annotated[
        tuple[Literal["entropies", "logits", "hidden_states"], ...],
        Field(strict=False, max_length=3),
    ] = ()
    """Further fields of sampled tokens that the function reads: "entropies", "hidden_states" and
    "logits". Logits take memory for tokens times vocabulary."""

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

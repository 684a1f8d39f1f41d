"""Options that several loss types of the policy channel share, as base sections."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import NotNegative, Positive, Section

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


class TokenLoss(CorrectedLoss):
    """Options of losses with a term of its own for each token."""

    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the step's tokens that have a policy gradient, those with the highest entropy at its
    start (0.2 in arXiv 2506.01939); below 1 a step takes one forward more."""

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

    @model_validator(mode="after")
    def _kl_options_have_an_effect(self) -> Self:
        for name, default in (("kl_importance", False), ("kl_estimator", "k3")):
            if self.kl_beta == 0 and getattr(self, name) != default:
                raise ValueError(
                    f"{name} is {str(getattr(self, name)).lower()} but kl_beta is 0, so there is "
                    f"no KL for it: set kl_beta above 0 or remove {name}"
                )
        return self


def of_whole_rollouts(ratio_level: RatioLevel) -> str:
    """Return why a ratio level allows one advantage per rollout only; "" if it does not."""
    if ratio_level != "sequence":
        return ""
    return (
        "loss.ratio_level is 'sequence', one ratio and one advantage for a rollout: set it to "
        "'sequence_token' or 'token'"
    )

"""The preference loss of the replay channel and its options."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import NotNegative, Number, Positive, Section, Share

MixedLoss = Literal[
    "dpo",
    "sigmoid_norm",
    "hinge",
    "robust",
    "exo_pair",
    "apo_zero",
    "apo_down",
    "bco_pair",
    "ipo",
    "sft",
]
MPO_TYPES: dict[MixedLoss, float] = {"dpo": 0.8, "bco_pair": 0.2, "sft": 1.0}
SMOOTHED = {"dpo", "sigmoid_norm", "robust", "exo_pair", "simpo"}
ON_LOG_RATIOS = {"apo_zero", "apo_down"}


class PreferenceConfig(Section):
    """The loss on preference pairs."""

    loss: Literal[
        "dpo",
        "ipo",
        "simpo",
        "sigmoid_norm",
        "hinge",
        "robust",
        "exo_pair",
        "apo_zero",
        "apo_down",
        "bco_pair",
        "mpo",
    ] = "dpo"
    """The preference loss, by TRL's names ("dpo" is its "sigmoid"). "mpo" is the weighted sum of
    mpo_types. For simpo no reference policy is loaded, since it needs none."""

    dpo_beta: Positive = 0.1
    """Regularization strength towards the frozen reference policy, for all losses but simpo."""

    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair's labels are flipped (dpo, sigmoid_norm, robust, simpo); exo_pair
    requires it, 1e-3 in its paper."""

    mpo_types: dict[MixedLoss, Positive] = Field(
        default_factory=lambda: dict(MPO_TYPES), max_length=10
    )
    """Weight of each loss in mpo; "sft" is the chosen answer's negative log-prob per token."""

    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = (
        "reverse_kl"
    )
    """Divergence from the reference policy that the loss regularizes (f-DPO)."""

    f_alpha: Number = 0.5
    """Order of alpha_divergence, TRL's f_alpha_divergence_coef: 1 is reverse KL, 0 forward KL."""

    ld_alpha: Share | None = None
    """Weight of an answer's tokens beyond the length of the pair's shorter answer (LD-DPO); not set
    weights all tokens equally."""

    use_weighting: bool = False
    """Whether to weight each pair by the likelihood of its answers under the policy (WPO)."""

    simpo_beta: Positive = 2.0
    """Scale of simpo's difference of average log-probs."""

    simpo_gamma: NotNegative = 0.5
    """Target margin of simpo; the default is the authors' ratio of 0.25 times simpo_beta."""

    @property
    def loss_terms(self) -> tuple[str, ...]:
        """Losses that the pairs are trained with: those of the mix, or the single one."""
        return tuple(self.mpo_types) if self.loss == "mpo" else (self.loss,)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.label_smoothing > 0 and not SMOOTHED.intersection(self.loss_terms):
            yield (
                f"label_smoothing is {self.label_smoothing} but loss is {self.loss!r}, which has "
                "none: remove it, or set loss to 'dpo' or 'simpo'"
            )
        if self.label_smoothing == 0 and "exo_pair" in self.loss_terms:
            yield (
                "label_smoothing is 0 but exo_pair takes its logarithm: set label_smoothing to "
                "1e-3, as its paper"
            )
        if not self.mpo_types:
            yield "mpo_types is empty: give at least one loss a weight, as dpo = 1.0"
        only = sorted(ON_LOG_RATIOS.intersection(self.loss_terms))
        if self.loss in ("ipo", "simpo"):
            only = [self.loss]
        if only and self.f_divergence_type != "reverse_kl":
            yield (
                f"f_divergence_type is {self.f_divergence_type!r} but {', '.join(only)} knows no "
                "other than 'reverse_kl': remove it, or set loss to 'dpo'"
            )
        if self.loss == "simpo" and self.ld_alpha is not None:
            yield (
                f"ld_alpha is {self.ld_alpha} but loss is 'simpo', which averages over all tokens: "
                "remove it, or set loss to 'dpo'"
            )


class WeightedPreferenceConfig(PreferenceConfig):
    """The loss on preference pairs with its weight in the total."""

    beta: NotNegative = 0.0
    """Weight of the replay loss in the total; 0 turns the channel off."""

    @property
    def on(self) -> bool:
        """Whether the channel is active in the run."""
        return self.beta > 0

    @property
    def needs_reference(self) -> bool:
        """Whether pairs need the log-probs of the frozen initial policy."""
        return self.on and self.loss != "simpo"

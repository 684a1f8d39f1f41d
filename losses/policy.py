"""Index of the policy losses; each is defined in the module of its family."""

from composer_mesh.losses.decoupled import Rejection, decoupled_ppo_loss
from composer_mesh.losses.entropy import high_entropy_mask, token_entropies
from composer_mesh.losses.grpo import (
    cispo_loss,
    gmpo_loss,
    grpo_loss,
    reinforce_loss,
    sapo_loss,
    vespo_loss,
)
from composer_mesh.losses.logprobs import (
    LOG_RATIO_LIMIT,
    Aggregation,
    CorrectionMode,
    KlEstimator,
    PolicyLoss,
    RatioLevel,
    Reduction,
    aggregate,
    aggregation_normalizer,
    off_policy_weights,
    sampling_weights,
    token_kl,
    token_logprobs,
)
from composer_mesh.losses.prime_rl import (
    dppo_loss,
    prime_rl_ipo_loss,
    prime_rl_loss,
)

__all__ = [
    "LOG_RATIO_LIMIT",
    "Aggregation",
    "CorrectionMode",
    "KlEstimator",
    "PolicyLoss",
    "RatioLevel",
    "Reduction",
    "Rejection",
    "aggregate",
    "aggregation_normalizer",
    "cispo_loss",
    "decoupled_ppo_loss",
    "dppo_loss",
    "gmpo_loss",
    "grpo_loss",
    "high_entropy_mask",
    "off_policy_weights",
    "prime_rl_ipo_loss",
    "prime_rl_loss",
    "reinforce_loss",
    "sampling_weights",
    "sapo_loss",
    "token_entropies",
    "token_kl",
    "token_logprobs",
    "vespo_loss",
]

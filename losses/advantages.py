"""Advantages of a rollout, or a token, over a baseline. Index of the modules:

`group_advantages` gives one number per rollout or per token, `turn_advantages` one per turn;
`reward_shaping` transforms rewards before. Everything is computed from the whole
batch, without gradient, and not reduced over ranks, so gather rewards first.
"""

from composer_mesh.losses.group_advantages import (
    AdvantageKind,
    Scale,
    Singleton,
    Std,
    gpg_advantages,
    group_advantages,
    grpo_lead_length_reward,
    kimi_length_reward,
    masked_whiten,
    max_rl_advantages,
    opo_advantages,
    overlong_penalty,
    reinforce_plus_plus_baseline_advantages,
    relative_length_penalty,
    rloo_advantages,
)
from composer_mesh.losses.turn_advantages import (
    Baseline,
    gigpo_advantages,
    mt_grpo_advantages,
    turn_return_advantages,
    turn_returns,
)

__all__ = [
    "AdvantageKind",
    "Baseline",
    "Scale",
    "Singleton",
    "Std",
    "gigpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "grpo_lead_length_reward",
    "kimi_length_reward",
    "masked_whiten",
    "max_rl_advantages",
    "mt_grpo_advantages",
    "opo_advantages",
    "overlong_penalty",
    "reinforce_plus_plus_baseline_advantages",
    "relative_length_penalty",
    "rloo_advantages",
    "turn_return_advantages",
    "turn_returns",
]

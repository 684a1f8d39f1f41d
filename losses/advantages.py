"""Advantages of a rollout, or a token, over a baseline. Index of the modules:

`group_advantages` gives one number per rollout, `turn_advantages` one per turn, `token_advantages`
one per token; `normalization` has statistics over masked batches, `reward_shaping` transforms
rewards before, `role_advantages` handles roles of multi-agent rollouts. Everything is computed from
the whole batch, without gradient, and not reduced over ranks, so gather rewards first.
"""

from composer_mesh.losses.group_advantages import (
    AdvantageKind,
    Scale,
    Singleton,
    Std,
    gpg_advantages,
    group_advantages,
    max_rl_advantages,
    opo_advantages,
    remax_advantages,
    rloo_advantages,
)
from composer_mesh.losses.normalization import (
    Level,
    grouped_normalization,
    masked_normalization,
    masked_whiten,
)
from composer_mesh.losses.reward_shaping import (
    gdpo_advantages,
    grpo_lead_length_reward,
    kimi_length_reward,
    overlong_penalty,
    relative_length_penalty,
    weighted_rewards,
)
from composer_mesh.losses.role_advantages import RoleBaselines
from composer_mesh.losses.token_advantages import (
    Gaps,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_token_advantages,
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
    "Gaps",
    "Level",
    "RoleBaselines",
    "Scale",
    "Singleton",
    "Std",
    "gdpo_advantages",
    "gigpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "grouped_normalization",
    "grpo_lead_length_reward",
    "kimi_length_reward",
    "masked_normalization",
    "masked_whiten",
    "max_rl_advantages",
    "mt_grpo_advantages",
    "opo_advantages",
    "overlong_penalty",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "relative_length_penalty",
    "remax_advantages",
    "remax_token_advantages",
    "rloo_advantages",
    "turn_return_advantages",
    "turn_returns",
    "weighted_rewards",
]

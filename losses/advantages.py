"""Advantages: how much better a rollout, or a token, did than a baseline. The table of contents.

One number a rollout stands in `group_advantages`, one a token in `token_advantages`, statistics
over masked batches in `normalization`. Everything is computed from the whole batch, without
gradient; nothing here is reduced over ranks, so gather rewards first.
"""

from composer_mesh.losses.group_advantages import (
    AdvantageKind,
    Scale,
    Singleton,
    Std,
    group_advantages,
    max_rl_advantages,
    remax_advantages,
    rloo_advantages,
)
from composer_mesh.losses.normalization import (
    Level,
    grouped_normalization,
    masked_normalization,
    masked_whiten,
)
from composer_mesh.losses.token_advantages import (
    Gaps,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_token_advantages,
)

__all__ = [
    "AdvantageKind",
    "Gaps",
    "Level",
    "Scale",
    "Singleton",
    "Std",
    "group_advantages",
    "grouped_normalization",
    "masked_normalization",
    "masked_whiten",
    "max_rl_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "remax_token_advantages",
    "rloo_advantages",
]

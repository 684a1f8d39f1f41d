"""Advantages and policy losses of this project by the signatures that verl calls.

verl hands an estimator rewards, a mask and the ids of groups, and no teacher: the SDPO and the
replay channel are losses (`plugins.frameworks.verl.losses`), not parts of an advantage.

Axes: B rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from composer_mesh.losses.advantages import group_advantages
from composer_mesh.losses.policy import PolicyLoss, cispo_loss, dppo_loss, grpo_loss

ESTIMATOR = "grpo_composer"


def grpo_composer(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | None = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return our GRPO advantages, and the same as returns, [B, T] each.

    Rows of one `index` are a group. A row without a token under `response_mask` [B, T], as the
    agent loop makes of a screened rollout, is compared with no other. A group of one gets 0. With
    `norm_adv_by_std_in_grpo` false in verl's `config` nothing is divided by the deviation.
    """
    if index is None:
        raise ValueError(
            "grpo_composer needs the group of each row: let the batch have the key `uid`"
        )
    mask = response_mask.bool()
    rewards = token_level_rewards.detach().float().sum(-1)
    groups = _groups([str(one) for one in index])
    present = torch.zeros(groups.shape, dtype=torch.bool, device=rewards.device)
    present[groups >= 0] = mask.any(-1)[groups[groups >= 0]]
    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    found = group_advantages(
        rewards[groups.clamp(min=0)], scale="group" if by_std else "none", present=present
    )
    by_row = torch.zeros_like(rewards)
    by_row[groups[groups >= 0]] = found[groups >= 0]
    advantages = by_row.unsqueeze(-1) * mask
    return advantages, advantages


def _groups(names: Sequence[str]) -> Tensor:
    """Return the rows of each group, [groups, largest], filled up with -1."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    width = max(map(len, rows.values()))
    return torch.tensor([one + [-1] * (width - len(one)) for one in rows.values()])


VerlLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
Options = Callable[[Any], dict[str, Any]]


def verl_policy_loss(loss: Callable[..., PolicyLoss], options: Options) -> VerlLoss:
    """Return one of our policy losses as verl calls it; `options` are made of its actor's config.

    The terms are reduced by verl's own `agg_loss`, so that each `loss_agg_mode` means what it means
    there. To register one with settings of yours:

        register_policy_loss("mine")(verl_policy_loss(cispo_loss, lambda actor: {"clip_high": 5.0}))
    """

    def found(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        from verl.trainer.ppo.core_algos import agg_loss

        mask = response_mask.bool()
        terms = loss(
            log_prob,
            old_log_prob,
            advantages,
            mask,
            reduction="none",
            sampling_weights=rollout_is_weights,
            **options(config),
        )
        reduced = agg_loss(
            loss_mat=terms.loss,
            loss_mask=mask,
            loss_agg_mode=loss_agg_mode,
            **config.global_batch_info,
        )
        count = mask.sum().clamp(min=1)
        figures = {"pg_clipfrac": terms.clipped_fraction, "ppo_kl": terms.kl_k3}
        return reduced, {
            f"actor/{name}": float(one.detach().sum() / count) for name, one in figures.items()
        }

    return found


def clip_options(actor: Any) -> dict[str, Any]:
    """Return the clip bounds of verl's actor, as `clip_low` and `clip_high`."""
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    return {
        "clip_low": actor.clip_ratio if low is None else low,
        "clip_high": actor.clip_ratio if high is None else high,
    }


def _high(actor: Any) -> dict[str, Any]:
    return {"clip_high": clip_options(actor)["clip_high"]}


def _none(_actor: Any) -> dict[str, Any]:
    return {}


POLICY_LOSSES: Mapping[str, VerlLoss] = MappingProxyType(
    {
        "composer_grpo": verl_policy_loss(grpo_loss, clip_options),
        "composer_cispo": verl_policy_loss(cispo_loss, _high),
        "composer_dppo": verl_policy_loss(dppo_loss, _none),
    }
)
"""Policy losses by the names that `loss_mode` of verl's actor may have; docs/losses.md has each."""

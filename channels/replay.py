"""The replay channel: preference pairs as ids, and the loss of a config section on them.

Axes: B pairs of a microbatch.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from composer_mesh.channels.step import unread
from composer_mesh.configs.preference import PreferenceConfig
from composer_mesh.configs.replay import PairWeight
from composer_mesh.losses.preference import (
    PreferenceLoss,
    dpo_loss,
    ipo_loss,
    mpo_loss,
    simpo_loss,
)
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pairs import PreferencePair, teachers_margin

Sides = tuple[Tensor, Tensor]
"""Values [B] of the chosen and of the rejected answers."""

FIGURES = ("accuracy", "margin", "chosen_reward", "rejected_reward")
"""Metrics of a step's pairs, each a mean over them."""


def preference_loss(
    config: PreferenceConfig,
    policy: Sides,
    reference: Sides | None,
    lengths: Sides,
    weights: Tensor | None,
    normalizer: int,
) -> PreferenceLoss:
    """Compute the loss of a config section; only SimPO needs no log-probs of a reference."""
    if reference is None:
        return simpo_loss(
            *policy,
            *lengths,
            beta=config.simpo_beta,
            gamma=config.simpo_gamma,
            label_smoothing=config.label_smoothing,
            normalizer=normalizer,
            weights=weights,
        )
    shared: dict[str, Any] = {
        "normalizer": normalizer,
        "weights": weights,
        "beta": config.dpo_beta,
    }
    if config.loss == "ipo":
        return ipo_loss(*policy, *reference, *lengths, **shared)
    shared |= {
        "f_divergence_type": config.f_divergence_type,
        "f_alpha": config.f_alpha,
        "label_smoothing": config.label_smoothing,
    }
    if config.loss == "mpo":
        types = {loss_type(name): weight for name, weight in config.mpo_types.items()}
        return mpo_loss(*policy, *reference, *lengths, **shared, loss_types=types)
    counts = lengths if config.loss == "sigmoid_norm" else (None, None)
    return dpo_loss(*policy, *reference, *counts, **shared, loss_type=loss_type(config.loss))


def figures_of(result: PreferenceLoss) -> dict[str, Tensor]:
    """Return the metrics of a loss by name, without waiting for their device."""
    return {name: unread(getattr(result, name)) for name in FIGURES}


def loss_type(name: str) -> Any:
    """Return the library's name of a configured loss."""
    return "sigmoid" if name == "dpo" else name


def pair_samples(
    pairs: Sequence[PreferencePair],
    chat: ChatFormat,
    max_context: int,
    weight: PairWeight = "none",
) -> list[PairSample]:
    """Convert pairs to ids, encoding the chosen text once; drop pairs longer than `max_context`.

    With the weight "margin" each pair weighs what the teachers' margin is.
    """
    samples = [
        PairSample(
            p.pair_id,
            p.context_ids,
            chat.action(p.chosen_text),
            p.rejected_ids,
            p.reference,
            teachers_margin(p) if weight == "margin" else 1.0,
        )
        for p in pairs
    ]
    return [
        sample
        for sample in samples
        if len(sample.context_ids) + max(len(sample.chosen_ids), len(sample.rejected_ids))
        <= max_context
    ]

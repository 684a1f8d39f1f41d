"""The replay channel of a step: preference pairs against the frozen reference, or without one.

The reference's log-probs come with the pairs; who computed them is not known here.

Axes: B pairs of a microbatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.losses.preference import (
    PreferenceLoss,
    dpo_loss,
    ipo_loss,
    sequence_logprobs,
    simpo_loss,
)
from composer_mesh.rollouts.batches import PairSample

Sides = tuple[Tensor, Tensor]


class ReplayChannel:
    """The configured preference loss; only SimPO does without a reference."""

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config

    def loss(
        self, model: LanguageModel, pairs: Sequence[PairSample], normalizer: int
    ) -> PreferenceLoss:
        """The loss of some pairs, over the number of pairs in the whole batch."""
        config = self._config
        chosen, rejected = answer_logprobs(model, pairs)
        lengths = _lengths(pairs, chosen.device)
        if config.loss == "simpo":
            return simpo_loss(
                chosen,
                rejected,
                *lengths,
                beta=config.simpo_beta,
                gamma=config.simpo_gamma,
                label_smoothing=config.label_smoothing,
                normalizer=normalizer,
            )
        reference = _reference(pairs, chosen)
        sides = (chosen, rejected, *reference)
        if config.loss == "ipo":
            return ipo_loss(*sides, *lengths, beta=config.dpo_beta, normalizer=normalizer)
        return dpo_loss(
            *sides,
            beta=config.dpo_beta,
            label_smoothing=config.label_smoothing,
            normalizer=normalizer,
        )


def answer_logprobs(model: LanguageModel, pairs: Sequence[PairSample]) -> Sides:
    """Summed log-probs [B] in nats of the chosen and of the rejected answers."""
    answers = [p.chosen_ids for p in pairs] + [p.rejected_ids for p in pairs]
    contexts = [p.context_ids for p in pairs] * 2
    sequences = [context + answer for context, answer in zip(contexts, answers, strict=True)]
    masks = [[False] * len(c) + [True] * len(a) for c, a in zip(contexts, answers, strict=True)]
    mask = padded(masks, model.device)[:, 1:].bool()
    logprobs = model.logprobs(model.hidden(sequences), padded(sequences, model.device), mask)
    sums = sequence_logprobs(logprobs, mask)
    return sums[: len(pairs)], sums[len(pairs) :]


def _reference(pairs: Sequence[PairSample], like: Tensor) -> Sides:
    """The frozen policy's log-probs [B] of both answers, as they came with the pairs."""
    without = [pair.pair_id for pair in pairs if pair.reference is None]
    if without:
        raise ValueError(
            f"{len(without)} of {len(pairs)} pairs have no reference log-probs (first: "
            f"{without[0]}): score them with the frozen initial policy before they are trained on"
        )
    both = [pair.reference for pair in pairs if pair.reference is not None]
    chosen, rejected = (torch.tensor(side, dtype=like.dtype) for side in zip(*both, strict=True))
    return chosen.to(like.device), rejected.to(like.device)


def _lengths(pairs: Sequence[PairSample], device: torch.device) -> Sides:
    chosen = torch.tensor([len(pair.chosen_ids) for pair in pairs])
    rejected = torch.tensor([len(pair.rejected_ids) for pair in pairs])
    return chosen.to(device), rejected.to(device)

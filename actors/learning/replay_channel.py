"""The replay channel of a step: preference losses on pairs, with or without a frozen reference.

The reference's log-probs are part of the pairs.

Axes: B pairs of a microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_mesh.actors.learning.update_pass import (
    MicrobatchStates,
    TrainedChannel,
    UpdatePass,
    answer_sequences,
)
from composer_mesh.actors.learning.weight_update import UpdatePart
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel, padded
from composer_mesh.channels.replay import Sides, figures_of, preference_loss
from composer_mesh.channels.step import step_loss
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.losses.preference import PreferenceLoss, sequence_logprobs, wpo_weights
from composer_mesh.rollouts.batches import PairSample
from composer_mesh.rollouts.step_plan import pair_groups, pair_sides

SIDES = ("chosen", "rejected")


class ReplayChannel(TrainedChannel):
    """Computes the configured preference loss; only SimPO needs no reference.

    Pairs that are in no microbatch are computed in groups of at most `budget` tokens.
    """

    name = "replay"

    def __init__(self, config: WeightedPreferenceConfig, budget: int = 0) -> None:
        self._config, self._budget = config, budget

    def term(self, states: MicrobatchStates, /) -> Tensor | None:
        """Return the loss of a microbatch's pairs; None without any."""
        if not states.pairs:
            return None
        return self._pairs(states.pairs, states.of_pairs, states.one)

    def train_rest(self, one: UpdatePass, /) -> None:
        """Add the gradients of the pairs that are in no microbatch with samples."""
        if not self._config.on:
            return
        pairs, plan = one.batch.pairs, one.plan
        groups = pair_groups(pairs, plan.pairs, self._budget)
        with one.gradients.of(self.name):
            for number, group in enumerate(groups, start=1):
                own = [pairs[place] for place in group]
                one.losses({self.name: partial(self._pairs, own, None, one)}).total().backward()
                one.end_part(UpdatePart.of(f"group {number} of {len(groups)} of pairs", pairs=own))
            for _ in range(one.rounds.pairs - len(groups)):
                one.model.dummy_forward().backward()
            self._train_large([pairs[place] for place in plan.large_pairs], one)

    def _pairs(
        self, pairs: Sequence[PairSample], hidden: HiddenStates | None, one: UpdatePass
    ) -> Tensor:
        result = self.loss(one.model, pairs, len(one.batch.pairs), hidden)
        _add_figures(result, one)
        return result.loss

    def _train_large(self, pairs: Sequence[PairSample], one: UpdatePass) -> None:
        """Add the gradients of pairs whose sides are computed one after the other."""
        for pair in pairs:
            weight = one.weights[self.name]
            result = self.backward_by_sides(one.model, pair, len(one.batch.pairs), weight)
            one.sums.add({self.name: result.loss})
            _add_figures(result, one)
            one.end_part(UpdatePart.of("a long pair", pairs=[pair]))
        for _ in range(one.rounds.large_pairs - len(pairs) if one.sharded else 0):
            with torch.no_grad():
                for _ in SIDES:
                    one.model.dummy_forward()
            for _ in SIDES:
                one.model.dummy_forward().backward()

    def loss(
        self,
        model: LanguageModel,
        pairs: Sequence[PairSample],
        normalizer: int,
        hidden: HiddenStates | None = None,
    ) -> PreferenceLoss:
        """Return the loss of some pairs, divided by the number of pairs in the whole batch.

        `hidden` has the states of `answer_sequences`; without it they are computed.
        """
        answers = _Answers.of(model, pairs, hidden, self._config.use_weighting)
        return self._loss(answers, pairs, normalizer)

    def backward_by_sides(
        self, model: LanguageModel, pair: PairSample, normalizer: int, weight: float
    ) -> PreferenceLoss:
        """Add the gradients of one pair, `weight` times its loss; return the loss without a graph.

        Its sides are never in memory together: both are computed without gradients, of which
        follows the gradient by each log-prob, and then again, each with its own backward.
        """
        with torch.no_grad():
            answers = _Answers.by_sides(model, pair, self._config.use_weighting)
        leaf = answers.logprobs.requires_grad_()
        result = self._loss(replace(answers, logprobs=leaf), [pair], normalizer)
        total = step_loss({self.name: lambda: result.loss}, {self.name: weight}).total()
        (pulls,) = torch.autograd.grad(total, leaf)
        for ids, pull in zip(pair_sides(pair), pulls, strict=True):
            hidden, mask = _of_side(model, pair, ids)
            logprobs = model.logprobs(hidden, padded([ids], model.device), mask)
            (logprobs * pull[: mask.shape[1]]).sum().backward()
        return PreferenceLoss(*(getattr(result, one.name).detach() for one in fields(result)))

    def _loss(
        self, answers: "_Answers", pairs: Sequence[PairSample], normalizer: int
    ) -> PreferenceLoss:
        config = self._config
        weights = _weighted(answers.pair_weights(), pairs, answers.logprobs)
        policy = answers.sums(config.ld_alpha)
        reference = None if config.loss == "simpo" else _reference(pairs, policy[0])
        return preference_loss(config, policy, reference, answers.lengths, weights, normalizer)


def _add_figures(result: PreferenceLoss, one: UpdatePass) -> None:
    for name, value in figures_of(result).items():
        one.sums.figures[f"replay/{name}"] += value


@dataclass(frozen=True)
class _Answers:
    """The chosen answers of some pairs, then the rejected ones, by token [2 B, T - 1].

    `collisions` are there where pairs are weighted.
    """

    logprobs: Tensor
    mask: Tensor
    collisions: Tensor | None

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        pairs: Sequence[PairSample],
        hidden: HiddenStates | None = None,
        weighted: bool = False,
    ) -> "_Answers":
        sequences = answer_sequences(pairs)
        contexts = [len(pair.context_ids) for pair in pairs] * 2
        masks = [
            [False] * context + [True] * (len(sequence) - context)
            for context, sequence in zip(contexts, sequences, strict=True)
        ]
        mask = padded(masks, model.device)[:, 1:].bool()
        hidden = model.hidden(sequences) if hidden is None else hidden
        logprobs = model.logprobs(hidden, padded(sequences, model.device), mask)
        return cls(logprobs, mask, model.collision_logprobs(hidden, mask) if weighted else None)

    @classmethod
    def by_sides(cls, model: LanguageModel, pair: PairSample, weighted: bool) -> "_Answers":
        """Compute both answers of a pair, one after the other."""
        found: list[list[Tensor]] = []
        for ids in pair_sides(pair):
            hidden, mask = _of_side(model, pair, ids)
            parts = [model.logprobs(hidden, padded([ids], model.device), mask), mask]
            parts += [model.collision_logprobs(hidden, mask)] if weighted else []
            found.append([part[0] for part in parts])
        both = [pad_sequence(list(parts), batch_first=True) for parts in zip(*found, strict=True)]
        return cls(both[0], both[1], both[2] if weighted else None)

    @property
    def lengths(self) -> Sides:
        return _sides(self.mask.sum(-1))

    def sums(self, ld_alpha: float | None) -> Sides:
        """Return summed log-probs [B] in nats; `ld_alpha` weights the longer answer's excess."""
        if ld_alpha is None:
            return _sides(sequence_logprobs(self.logprobs, self.mask))
        shared = torch.minimum(*self.lengths).repeat(2)
        return _sides(
            sequence_logprobs(self.logprobs, self.mask, ld_alpha=ld_alpha, shared_lengths=shared)
        )

    def pair_weights(self) -> Tensor | None:
        """Return WPO's weights [B]: the product of both answers' weights under the policy."""
        if self.collisions is None:
            return None
        return torch.mul(*_sides(wpo_weights(self.logprobs, self.collisions, self.mask)))


def answer_logprobs(
    model: LanguageModel, pairs: Sequence[PairSample], ld_alpha: float | None = None
) -> Sides:
    """Return the summed log-probs [B] in nats of the chosen and of the rejected answers."""
    return _Answers.of(model, pairs).sums(ld_alpha)


def answer_logprobs_by_sides(
    model: LanguageModel, pair: PairSample, ld_alpha: float | None = None
) -> Sides:
    """Return `answer_logprobs` of one pair, whose sides are computed one after the other."""
    return _Answers.by_sides(model, pair, weighted=False).sums(ld_alpha)


def _of_side(model: LanguageModel, pair: PairSample, ids: list[int]) -> tuple[HiddenStates, Tensor]:
    """Return the hidden states of one side of a pair, and the mask [1, T - 1] of its answer."""
    context = len(pair.context_ids)
    mask = torch.arange(1, len(ids), device=model.device)[None] >= context
    return model.hidden([ids]), mask


def _weighted(weights: Tensor | None, pairs: Sequence[PairSample], like: Tensor) -> Tensor | None:
    """Return weights [B] times those of the pairs themselves; None if all are 1."""
    if all(pair.weight == 1 for pair in pairs):
        return weights
    own = torch.tensor([pair.weight for pair in pairs], dtype=like.dtype, device=like.device)
    return own if weights is None else weights * own


def _sides(values: Tensor) -> Sides:
    """Split values into those of the chosen and those of the rejected answers."""
    half = len(values) // 2
    return values[:half], values[half:]


def _reference(pairs: Sequence[PairSample], like: Tensor) -> Sides:
    """Return the reference's log-probs [B] of both answers, as stored in the pairs."""
    without = [pair.pair_id for pair in pairs if pair.reference is None]
    if without:
        raise ValueError(
            f"{len(without)} of {len(pairs)} pairs have no reference log-probs (first: "
            f"{without[0]}): score them with the frozen initial policy before they are trained on"
        )
    both = [pair.reference for pair in pairs if pair.reference is not None]
    chosen, rejected = (torch.tensor(side, dtype=like.dtype) for side in zip(*both, strict=True))
    return chosen.to(like.device), rejected.to(like.device)

"""Gradients of one update: forward, channel losses and backward of each of its microbatches.

All ranks of a sharded model run the same number of forwards, whatever their shares.
"""

from collections.abc import Sequence
from functools import partial

from composer_mesh.actors.learning.mixture_losses import MixtureLosses
from composer_mesh.actors.learning.not_finite import Part
from composer_mesh.actors.learning.replay_channel import answer_sequences
from composer_mesh.actors.learning.update_pass import (
    MicrobatchStates,
    TrainedChannel,
    UpdatePass,
    content_of,
)
from composer_mesh.channels.step import POLICY, StepLoss
from composer_mesh.configs.trainer import Sharing
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.prefix_tree import unique_ids
from composer_mesh.rollouts.step_plan import Microbatch, RankPlan, Rounds


class UpdateGradients:
    """Accumulates the gradients of this rank's share of an update."""

    def __init__(
        self, channels: Sequence[TrainedChannel], experts: MixtureLosses, sharing: Sharing
    ) -> None:
        self._channels, self._experts, self._sharing = channels, experts, sharing

    def accumulate(self, one: UpdatePass) -> None:
        """Add the gradients of a pass; return early where its teacher output is lost."""
        batch, plan, rounds = one.batch, one.plan, one.rounds
        if self._sharing != "off":
            one.sums.figures["tokens/unique"] += _unique_tokens(batch, plan)
        for index in range(rounds.microbatches):
            if index < len(plan.microbatches):
                self._train_microbatch(index, plan.microbatches[index], one)
            else:
                self._dummy_forward(index, one)
                made_progress(f"{_microbatch(index, rounds)} of step {batch.step + 1}")
            if one.lost and not one.sharded:
                return  # other ranks of a sharded model would wait for the rest
        for channel in self._channels:
            channel.train_rest(one)
        if batch.skipped.sequences:
            self._count_skipped(one)

    def _count_skipped(self, one: UpdatePass) -> None:
        """Add what the skipped samples would: a loss of 0, and gradients of 0 where none exist.

        An optimizer moves a weight whose gradient is 0, by its momentum, but none without gradient.
        """
        one.sums.losses.setdefault(POLICY, 0.0)
        rounds = one.rounds
        if not (rounds.microbatches or rounds.pairs or rounds.large_pairs):
            one.gradients.backward(StepLoss(others=[one.model.dummy_forward()]))

    def _train_microbatch(self, index: int, microbatch: Microbatch, one: UpdatePass) -> None:
        """Add the gradients of a microbatch: one forward, one backward unless it is measured."""
        samples, pairs = content_of(one.batch, microbatch)
        own, others = [sample.ids for sample in samples], answer_sequences(pairs)
        hidden = one.model.hidden([*own, *others], [one.experts for one in samples])
        balance = self._experts.loss(one.model, samples, one.batch, one.sums.figures)
        missing = one.rounds.trained[index] - microbatch.forwards if one.sharded else 0
        alone = [one.model.dummy_forward() for _ in range(missing)]
        if balance is not None:
            alone.append(balance)
        if self._sharing != "off":
            one.sums.figures["tokens/dense"] += sum(map(len, [*own, *others]))
            one.sums.figures["tokens/computed"] += len(hidden.computed)
        states = MicrobatchStates(
            one,
            index,
            microbatch,
            samples,
            pairs,
            hidden.part(slice(len(own)), max(map(len, own))) if own else None,
            hidden.part(slice(len(own), None), max(map(len, others))) if others else None,
        )
        losses = one.losses(
            {each.name: partial(each.term, states) for each in self._channels}, alone
        )
        part = Part.of(_microbatch(index, one.rounds), samples, pairs)
        one.checks.watch(part, hidden.computed)
        one.gradients.backward(losses, hidden.computed)
        one.end_part(part)

    def _dummy_forward(self, index: int, one: UpdatePass) -> None:
        """Run the models as often as ranks that have a microbatch of this index."""
        alone = [one.model.dummy_forward() for _ in range(one.rounds.trained[index])]
        states = MicrobatchStates(one, index, Microbatch([], []))
        for channel in self._channels:
            channel.term(states)
        one.gradients.backward(StepLoss(others=alone))


def _microbatch(index: int, rounds: Rounds) -> str:
    return f"microbatch {index + 1} of {rounds.microbatches}"


def _unique_tokens(batch: StepBatch, plan: RankPlan) -> int:
    """Return a rank's tokens, of which what sequences begin with in common counts once."""
    own = [batch.samples[place].ids for one in plan.microbatches for place in one.samples]
    pairs = [batch.pairs[place] for one in plan.microbatches for place in one.pairs]
    return unique_ids([*own, *answer_sequences(pairs)])

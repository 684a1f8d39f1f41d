"""Gradients of one update: forward, channel losses and backward of each of its microbatches.

Each loss is divided by its own count over the whole step, so microbatches and ranks simply add up.
All ranks of a sharded model run the same number of forwards, whatever their shares.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from composer_mesh.actors.learning.channel_gradients import ChannelGradients, ChannelLosses
from composer_mesh.actors.learning.mixture_losses import MixtureLosses
from composer_mesh.actors.learning.not_finite import FiniteChecks, Part
from composer_mesh.actors.learning.policy_channel import PolicyChannel
from composer_mesh.actors.learning.replay_channel import (
    SIDES,
    ReplayChannel,
    answer_sequences,
    figures_of,
)
from composer_mesh.actors.learning.sdpo_channel import (
    SdpoChannel,
    StudentRows,
    TeacherOutputSource,
    by_turn,
)
from composer_mesh.actors.learning.sums import StepSums
from composer_mesh.actors.learning.teacher_advantage import note_advantages, selected
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.actors.teacher_outputs.teacher_output_buffer import TeacherOutputsLost
from composer_mesh.configs.schema import Config
from composer_mesh.losses.preference import PreferenceLoss
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.batches import BatchCounts, PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.divergences import TurnDivergences
from composer_mesh.rollouts.prefix_tree import unique_ids
from composer_mesh.rollouts.step_plan import Microbatch, RankPlan, Rounds, pair_groups


@dataclass(frozen=True)
class Channels:
    """The model and what computes losses with it."""

    model: LanguageModel
    policy: PolicyChannel
    sdpo: SdpoChannel
    replay: ReplayChannel
    experts: MixtureLosses
    gradients: ChannelGradients


@dataclass
class UpdatePass:
    """One pass over an update's batch; without a source it trains no SDPO channel.

    The source counts microbatches through the step; `first` is the number of the first one here.
    """

    batch: StepBatch
    source: TeacherOutputSource | None
    plan: RankPlan
    rounds: Rounds
    counts: BatchCounts
    first: int
    reference: list[int] = field(default_factory=list)
    """Forwards of a sharded reference in each microbatch; empty for one on this rank alone."""
    sums: StepSums = field(default_factory=StepSums)
    divergences: list[TurnDivergences] = field(default_factory=list)
    checks: FiniteChecks = field(default_factory=FiniteChecks)
    lost: bool = False

    def end_part(self, part: Part) -> None:
        """Note what a part has computed, and report it as progress."""
        self.checks.note(part, self.sums.losses)
        made_progress(f"{part.name} of step {self.batch.step + 1}")


class UpdateGradients:
    """Accumulates the gradients of this rank's share of an update."""

    def __init__(self, channels: Channels, config: Config, ranks: Ranks, sharded: bool) -> None:
        self._model, self._gradients = channels.model, channels.gradients
        self._policy, self._experts = channels.policy, channels.experts
        self._sdpo, self._replay = channels.sdpo, channels.replay
        self._ranks, self._sharded = ranks, sharded
        self._replay_on, self._budget = config.replay.on, config.trainer.microbatch_tokens
        self._sharing = config.trainer.sharing

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
            if one.lost and not self._sharded:
                return  # other ranks of a sharded model would wait for the rest
        if self._replay_on:
            self._train_pairs(one)
        if batch.skipped.sequences:
            self._count_skipped(one)

    def _train_pairs(self, one: UpdatePass) -> None:
        """Add the gradients of the pairs that are in no microbatch with samples."""
        pairs, plan = one.batch.pairs, one.plan
        groups = pair_groups(pairs, plan.pairs, self._budget)
        with self._gradients.of("replay"):
            for number, group in enumerate(groups, start=1):
                own = [pairs[place] for place in group]
                self._pair_loss(own, None, one).backward()
                one.end_part(Part.of(f"group {number} of {len(groups)} of pairs", pairs=own))
            for _ in range(one.rounds.pairs - len(groups)):
                self._model.dummy_forward().backward()
            self._train_large_pairs([pairs[place] for place in plan.large_pairs], one)

    def _count_skipped(self, one: UpdatePass) -> None:
        """Add what the skipped samples would: a loss of 0, and gradients of 0 where none exist.

        An optimizer moves a weight whose gradient is 0, by its momentum, but none without gradient.
        """
        one.sums.losses.setdefault("policy", 0.0)
        rounds = one.rounds
        if not (rounds.microbatches or rounds.pairs or rounds.large_pairs):
            self._gradients.backward(ChannelLosses(others=[self._model.dummy_forward()]))

    def _train_microbatch(self, index: int, microbatch: Microbatch, one: UpdatePass) -> None:
        """Add the gradients of a microbatch: one forward, one backward unless it is measured."""
        samples, pairs = content_of(one.batch, microbatch)
        own, others = [sample.ids for sample in samples], answer_sequences(pairs)
        hidden = self._model.hidden([*own, *others], [one.experts for one in samples])
        balance = self._experts.loss(self._model, samples, one.batch, one.sums.figures)
        missing = one.rounds.trained[index] - microbatch.forwards if self._sharded else 0
        losses = ChannelLosses(hidden.computed)
        losses.others = [self._model.dummy_forward() for _ in range(missing)]
        if balance is not None:
            losses.others.append(balance)
        if self._sharing != "off":
            one.sums.figures["tokens/dense"] += sum(map(len, [*own, *others]))
            one.sums.figures["tokens/computed"] += len(hidden.computed)
        if samples:
            states = hidden.part(slice(len(own)), max(map(len, own)))
            self._trace_losses(index, microbatch, samples, states, one, losses)
        else:
            self._skip_traces(index, one)
        if pairs:
            states = hidden.part(slice(len(own), None), max(map(len, others)))
            losses.replay = self._pair_loss(pairs, states, one)
        part = Part.of(_microbatch(index, one.rounds), samples, pairs)
        one.checks.watch(part, hidden.computed)
        self._gradients.backward(losses)
        one.end_part(part)

    def _trace_losses(
        self,
        index: int,
        microbatch: Microbatch,
        samples: list[PolicySample],
        hidden: HiddenStates,
        one: UpdatePass,
        losses: ChannelLosses,
    ) -> None:
        """Set the weighted policy and SDPO losses of some samples."""
        losses.policy = loss = self._policy.loss(
            self._model, samples, hidden, one.counts, one.sums.figures
        )
        self._policy.run_with_others(one.reference[index] if one.reference else 0)
        one.sums.add("policy", loss)
        sdpo = self._distil(index, microbatch, samples, hidden, one)
        if sdpo is not None:
            one.sums.add("sdpo", sdpo)
            losses.sdpo = self._sdpo.alpha * sdpo

    def _distil(
        self,
        index: int,
        microbatch: Microbatch,
        samples: Sequence[PolicySample],
        hidden: HiddenStates,
        one: UpdatePass,
    ) -> Tensor | None:
        """Return a microbatch's SDPO loss; None without views, or if the output is lost."""
        if one.source is None:
            return None
        if not microbatch.views:
            one.source.skip(one.first + index)
            return None
        views = [one.batch.views[place] for place in microbatch.views]
        places = {sample.trace_id: row for row, sample in enumerate(samples)}
        rows = StudentRows.of(
            self._model,
            hidden,
            [places[view.trace_id] for view in views],
            views,
            self._sdpo.temperature,
        )
        teacher_output: TeacherOutput | None = None
        with suppress(TeacherOutputsLost):
            teacher_output = one.source.take(
                one.first + index, views, lambda: rows.top_k(self._sdpo.top_k)
            )
        if self._ranks.any_of_share(teacher_output is None) or teacher_output is None:
            one.source, one.lost = None, True
            return None
        if any(view.compared for view in views):
            compared = sum(view.compared for view in one.batch.views)
            note_advantages(rows, teacher_output, views, compared, one.sums.figures)
            rows, teacher_output = selected(rows, teacher_output, views, compared=False)
            views = [view for view in views if not view.compared]
            if not views:
                return None
        divergences = rows.hidden.new_empty(rows.rows.count, dtype=torch.float32)
        loss = self._sdpo.loss(
            rows, teacher_output, one.counts.sdpo_tokens, one.sums.figures, divergences
        )
        one.divergences += by_turn(views, divergences)
        return loss

    def _dummy_forward(self, index: int, one: UpdatePass) -> None:
        """Run the models as often as ranks that have a microbatch of this index."""
        losses = [self._model.dummy_forward() for _ in range(one.rounds.trained[index])]
        self._skip_traces(index, one)
        self._gradients.backward(ChannelLosses(others=losses))

    def _train_large_pairs(self, pairs: Sequence[PairSample], one: UpdatePass) -> None:
        """Add the gradients of pairs whose sides are computed one after the other."""
        for pair in pairs:
            result = self._replay.backward_by_sides(self._model, pair, len(one.batch.pairs))
            self._add_pair_figures(result, one)
            one.end_part(Part.of("a long pair", pairs=[pair]))
        for _ in range(one.rounds.large_pairs - len(pairs) if self._sharded else 0):
            with torch.no_grad():
                for _ in SIDES:
                    self._model.dummy_forward()
            for _ in SIDES:
                self._model.dummy_forward().backward()

    def _skip_traces(self, index: int, one: UpdatePass) -> None:
        """Run the frozen models to match ranks that have samples where this one has none."""
        self._policy.run_with_others(one.reference[index] if one.reference else 0)
        if one.source is not None:
            one.source.skip(one.first + index)

    def _pair_loss(
        self, pairs: Sequence[PairSample], hidden: HiddenStates | None, one: UpdatePass
    ) -> Tensor:
        """Return the weighted loss of some pairs."""
        result = self._replay.loss(self._model, pairs, len(one.batch.pairs), hidden)
        self._add_pair_figures(result, one)
        return self._replay.beta * result.loss

    def _add_pair_figures(self, result: PreferenceLoss, one: UpdatePass) -> None:
        one.sums.add("replay", result.loss)
        for name, value in figures_of(result).items():
            one.sums.figures[f"replay/{name}"] += value


def _microbatch(index: int, rounds: Rounds) -> str:
    return f"microbatch {index + 1} of {rounds.microbatches}"


def content_of(
    batch: StepBatch, microbatch: Microbatch
) -> tuple[list[PolicySample], list[PairSample]]:
    """Return the samples and pairs of a microbatch."""
    samples = [batch.samples[place] for place in microbatch.samples]
    return samples, [batch.pairs[place] for place in microbatch.pairs]


def _unique_tokens(batch: StepBatch, plan: RankPlan) -> int:
    """Return a rank's tokens, of which what sequences begin with in common counts once."""
    own = [batch.samples[place].ids for one in plan.microbatches for place in one.samples]
    pairs = [batch.pairs[place] for one in plan.microbatches for place in one.pairs]
    return unique_ids([*own, *answer_sequences(pairs)])

"""The three-channel optimizer step on tensors: forward, losses, backward, one update.

The losses are in `policy_channel`, `sdpo_channel` and `replay_channel`. Each is divided by its own
count over the whole step, so microbatches and ranks simply add up. Knows a model, its frozen
reference and an optimizer, but not where batches and teacher outputs come from.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.learning.channel_gradients import ChannelGradients, ChannelLosses
from composer_mesh.actors.learning.channel_weights import ChannelWeights
from composer_mesh.actors.learning.mixture_losses import MixtureLosses
from composer_mesh.actors.learning.policy_channel import PolicyChannel
from composer_mesh.actors.learning.replay_channel import (
    SIDES,
    ReplayChannel,
    answer_sequences,
    figures_of,
)
from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.learning.sdpo_channel import (
    SdpoChannel,
    StudentRows,
    TeacherOutputSource,
    by_turn,
)
from composer_mesh.actors.learning.sums import StepSums
from composer_mesh.actors.learning.teacher_advantage import note_advantages, selected
from composer_mesh.actors.learning.weight_update import WeightUpdate
from composer_mesh.actors.models.backend import Optimizers
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.optimizer_state import Kept
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_sharded
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.actors.teacher_outputs.teacher_output_buffer import TeacherOutputsLost
from composer_mesh.configs.schema import Config
from composer_mesh.losses.preference import PreferenceLoss
from composer_mesh.rollouts.batches import BatchCounts, PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.divergences import TurnDivergences
from composer_mesh.rollouts.minibatches import minibatches, plan_views
from composer_mesh.rollouts.prefix_tree import unique_ids
from composer_mesh.rollouts.step_plan import (
    Microbatch,
    RankPlan,
    Rounds,
    pair_groups,
    plan_step,
    reference_rounds,
    rounds_of,
    teacher_rounds,
)

UseOfStates = Callable[[LanguageModel, Sequence[PolicySample], HiddenStates], None]
"""What is done with the states of some samples."""


@dataclass
class _Pass:
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
    lost: bool = False


def needs_reference(config: Config) -> bool:
    """Return whether the step itself computes log-probs of the frozen initial policy."""
    return config.loss.needs_reference


class ThreeChannelStep:
    """Owns a model's optimizer; `reference` is frozen, or None if the loss needs none.

    All ranks of a sharded model run the same number of forwards in a step, whatever their shares.
    """

    def __init__(
        self,
        model: Any,
        reference: Any | None,
        config: Config,
        ranks: Ranks | None = None,
        custom: RunningCall | None = None,
        optimizers: Optimizers | None = None,
    ) -> None:
        self._config, self._ranks = config, ranks or Ranks()
        self._packed, self._budget = config.trainer.packing, config.trainer.microbatch_tokens
        self._sharing, self._sharded = config.trainer.sharing, is_sharded(model)
        self._model = LanguageModel(model, self._packed, self._sharing)
        frozen = None
        if reference is not None:
            frozen = LanguageModel(reference, self._packed, self._sharing)
        self._policy = PolicyChannel(config, frozen, custom)
        self._sdpo = SdpoChannel(config.sdpo, config.run.steps)
        self._replay = ReplayChannel(config.replay)
        self._weights = ChannelWeights(config)
        self._experts = MixtureLosses(config.trainer.moe)
        self._update = WeightUpdate(model, config, self._ranks, optimizers)
        self._gradients = ChannelGradients(model, self._update.weights, config, self._ranks)
        self.divergences: list[TurnDivergences] = []
        """Those of the hinted turns that the last step trained on this rank, at their first use."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trained weights by name, this rank's rows where they are sharded."""
        return self._update.weights

    def figures(self) -> dict[str, Any]:
        """Return the non-tensor state for a checkpoint, as JSON values."""
        return {
            "taid": self._sdpo.taid.state_dict(),
            "channel_weights": self._weights.state_dict(),
            "trained": self._update.trained(),
        }

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return this rank's part of the optimizer state; shares its memory."""
        return self._update.optimizer_state()

    def restore(self, figures: dict[str, Any], optimizer_state: Kept) -> None:
        """Restore a checkpoint's state, written by any number of ranks."""
        self._update.restore(figures["trained"], optimizer_state)
        self._sdpo.taid.load_state_dict(figures["taid"])
        # Checkpoints of versions without it are of runs whose weights follow nothing.
        self._weights.load_state_dict(figures.get("channel_weights", {}))

    def view_plan(self, batch: StepBatch) -> RankPlan:
        """Return the views of this rank's microbatches, through all updates of a step."""
        how = (self._budget, self._ranks.shares, self._packed, self._sharing)
        return plan_views(batch, self._parts(batch), *how)[self._ranks.share]

    def teacher_forwards(self, batch: StepBatch) -> list[int]:
        """Return a sharded teacher's forwards in each microbatch, through all updates of a step."""
        found: list[int] = []
        for part in self._parts(batch):
            plans = self._plans(part)
            own = teacher_rounds(part, self._together(plans), self._budget, self._sharing)
            found += own + [0] * (_most_microbatches(plans) - len(own))
        return found

    def _parts(self, batch: StepBatch) -> list[StepBatch]:
        trainer = self._config.trainer
        return minibatches(batch, trainer.updates_per_batch, trainer.epochs)

    def _rounds(self, batch: StepBatch, plans: Sequence[RankPlan]) -> Rounds:
        """Return the number of model forwards that this rank runs in an update."""
        return rounds_of(batch, self._together(plans), self._budget)

    def _together(self, plans: Sequence[RankPlan]) -> Sequence[RankPlan]:
        """Return the plans of the ranks that run forwards together with this one."""
        return plans if self._sharded else [plans[self._ranks.share]]

    def _plans(self, batch: StepBatch) -> list[RankPlan]:
        return plan_step(batch, self._budget, self._ranks.shares, self._packed, self._sharing)

    def run(
        self,
        batch: StepBatch,
        source: TeacherOutputSource | None,
        before_update: Callable[[], object] = lambda: None,
    ) -> dict[str, float | None]:
        """Run the updates; return the step's `loss/…`, `policy/…` and `tokens/…` metrics.

        `source` returns the teacher output for the views of each microbatch. If it raises
        `TeacherOutputsLost` on any rank, the update restarts without the SDPO channel, which the
        rest of the step lacks too. The weights do not change before `before_update` has returned.
        """
        if self._config.sdpo.on and batch.views and source is None:
            raise ValueError(f"step {batch.step} has {len(batch.views)} views but no signal")
        parts, first, sums = self._parts(batch), 0, list[StepSums]()
        norms, rate, lost = list[float](), 0.0, False
        divergences: dict[tuple[str, int], TurnDivergences] = {}
        self._policy.begin_step()
        self._sdpo.alpha, self._replay.beta = self._weights.of(batch.step)
        once = parts[: len(parts) // self._config.trainer.epochs]
        if self._policy.needs_start(len(parts)):
            self._before_updates(once, self._policy.remember, replayed=True)
            self._policy.remembered(self._ranks)
        if self._experts.compares(batch.step):
            self._before_updates(once, self._policy.note_without_replay, replayed=False)
        for part in parts:
            plans, measured = self._plans(part), self._policy.measured()
            done = self._accumulate(part, plans, None if lost else source, first)
            if self._ranks.any(done.lost):
                lost = True
                self._policy.forget_since(measured)
                done = self._accumulate(part, plans, None, first)
            divergences = {(one.trace_id, one.turn): one for one in done.divergences} | divergences
            sums.append(StepSums.of_ranks(self._ranks.of_shares(done.sums)))
            shares = self._gradients.finish()
            sums[-1].figures.update(shares or {})
            norm, rate = self._update.apply(
                batch.step, nothing if norms else before_update, summed=shares is not None
            )
            norms.append(norm)
            self._policy.updated()
            first += _most_microbatches(plans)
        self.divergences = list(divergences.values()) if self._ranks.first_of_share else []
        total = sums[0] if len(sums) == 1 else StepSums.of_updates(sums)
        if lost:
            total.figures["sdpo/lost_steps"] = 1
        if len(sums) > 1:
            total.figures["policy/updates"] = len(sums)
        return self._metrics(batch, total, sum(norms) / len(norms), rate)

    @torch.no_grad()
    def _before_updates(self, parts: Sequence[StepBatch], use: UseOfStates, replayed: bool) -> None:
        """Let the policy channel use the states of all samples before the first update."""
        for part in parts:
            plans = self._plans(part)
            plan, rounds = plans[self._ranks.share], self._rounds(part, plans)
            for index, forwards in enumerate(rounds.trained):
                left = forwards
                if index < len(plan.microbatches):
                    microbatch = plan.microbatches[index]
                    samples, pairs = _content(part, microbatch)
                    own, others = [one.ids for one in samples], answer_sequences(pairs)
                    experts = [one.experts for one in samples] if replayed else []
                    hidden = self._model.hidden([*own, *others], experts)
                    if samples:
                        states = hidden.part(slice(len(own)), max(map(len, own)))
                        use(self._model, samples, states)
                    left -= microbatch.forwards
                for _ in range(left if self._sharded else 0):
                    self._model.dummy_forward()

    def _accumulate(
        self,
        batch: StepBatch,
        plans: Sequence[RankPlan],
        source: TeacherOutputSource | None,
        first: int,
    ) -> _Pass:
        """Accumulate the gradients of this rank's share of an update, starting from zero."""
        plan, rounds = plans[self._ranks.share], self._rounds(batch, plans)
        one = _Pass(batch, source, plan, rounds, batch.counts(), first)
        if self._sharded and self._policy.has_reference:
            one.reference = reference_rounds(batch, plans, self._sharing)
        self._update.begin()
        self._gradients.begin(batch.step)
        if self._sharing != "off":
            one.sums.figures["tokens/unique"] += _unique_tokens(batch, plan)
        for index in range(rounds.microbatches):
            if index < len(plan.microbatches):
                self._train_microbatch(index, plan.microbatches[index], one)
            else:
                self._dummy_forward(index, one)
            if one.lost and not self._sharded:
                return one  # other ranks of a sharded model would wait for the rest
        if self._config.replay.on:
            groups = pair_groups(batch.pairs, plan.pairs, self._budget)
            with self._gradients.of("replay"):
                for group in groups:
                    pairs = [batch.pairs[place] for place in group]
                    self._pair_loss(pairs, None, one).backward()
                for _ in range(rounds.pairs - len(groups)):
                    self._model.dummy_forward().backward()
                self._train_large_pairs([batch.pairs[place] for place in plan.large_pairs], one)
        if batch.skipped.sequences:
            self._count_skipped(rounds, one)
        return one

    def _count_skipped(self, rounds: Rounds, one: _Pass) -> None:
        """Add what the skipped samples would: a loss of 0, and gradients of 0 where none exist.

        An optimizer moves a weight whose gradient is 0, by its momentum, but none without gradient.
        """
        one.sums.losses.setdefault("policy", 0.0)
        if not (rounds.microbatches or rounds.pairs or rounds.large_pairs):
            self._gradients.backward(ChannelLosses(others=[self._model.dummy_forward()]))

    def _metrics(
        self, batch: StepBatch, sums: StepSums, norm: float, rate: float
    ) -> dict[str, float | None]:
        sums.figures.update(self._policy.finish_step(self._ranks))
        sums.figures.update(self._sdpo.finish_step(sums.losses.get("sdpo"), batch.step))
        sums.figures.update(self._weights.finish_step(batch, sums.figures))
        if unique := sums.figures.get("tokens/unique"):
            sums.figures["tokens/computed_over_unique"] = sums.figures["tokens/computed"] / unique
        return {
            **sums.metrics(self._sdpo.alpha, self._replay.beta),
            **self._channel_weights(),
            "policy/grad_norm": norm,
            "policy/lr": rate,
            "tokens/trained": batch.action_tokens,
            "tokens/skipped": batch.skipped.tokens,
        }

    def _channel_weights(self) -> dict[str, float | None]:
        """Return the weights of the channels that the run has, in this step."""
        found: dict[str, float | None] = {}
        if self._config.sdpo.on:
            found["sdpo/alpha"] = self._sdpo.alpha
        if self._config.replay.on:
            found["replay/beta"] = self._replay.beta
        return found

    def _train_microbatch(self, index: int, microbatch: Microbatch, one: _Pass) -> None:
        """Add the gradients of a microbatch: one forward, one backward unless it is measured."""
        samples, pairs = _content(one.batch, microbatch)
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
            part = hidden.part(slice(len(own)), max(map(len, own)))
            self._trace_losses(index, microbatch, samples, part, one, losses)
        else:
            self._skip_traces(index, one)
        if pairs:
            part = hidden.part(slice(len(own), None), max(map(len, others)))
            losses.replay = self._pair_loss(pairs, part, one)
        self._gradients.backward(losses)

    def _trace_losses(
        self,
        index: int,
        microbatch: Microbatch,
        samples: list[PolicySample],
        hidden: HiddenStates,
        one: _Pass,
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
        one: _Pass,
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

    def _dummy_forward(self, index: int, one: _Pass) -> None:
        """Run the models as often as ranks that have a microbatch of this index."""
        losses = [self._model.dummy_forward() for _ in range(one.rounds.trained[index])]
        self._skip_traces(index, one)
        self._gradients.backward(ChannelLosses(others=losses))

    def _train_large_pairs(self, pairs: Sequence[PairSample], one: _Pass) -> None:
        """Add the gradients of pairs whose sides are computed one after the other."""
        for pair in pairs:
            result = self._replay.backward_by_sides(self._model, pair, len(one.batch.pairs))
            self._add_pair_figures(result, one)
        for _ in range(one.rounds.large_pairs - len(pairs) if self._sharded else 0):
            with torch.no_grad():
                for _ in SIDES:
                    self._model.dummy_forward()
            for _ in SIDES:
                self._model.dummy_forward().backward()

    def _skip_traces(self, index: int, one: _Pass) -> None:
        """Run the frozen models to match ranks that have samples where this one has none."""
        self._policy.run_with_others(one.reference[index] if one.reference else 0)
        if one.source is not None:
            one.source.skip(one.first + index)

    def _pair_loss(
        self, pairs: Sequence[PairSample], hidden: HiddenStates | None, one: _Pass
    ) -> Tensor:
        """Return the weighted loss of some pairs."""
        result = self._replay.loss(self._model, pairs, len(one.batch.pairs), hidden)
        self._add_pair_figures(result, one)
        return self._replay.beta * result.loss

    def _add_pair_figures(self, result: PreferenceLoss, one: _Pass) -> None:
        one.sums.add("replay", result.loss)
        for name, value in figures_of(result).items():
            one.sums.figures[f"replay/{name}"] += value


def nothing() -> None:
    """Wait for nothing."""


def _content(
    batch: StepBatch, microbatch: Microbatch
) -> tuple[list[PolicySample], list[PairSample]]:
    """Return the samples and pairs of a microbatch."""
    samples = [batch.samples[place] for place in microbatch.samples]
    return samples, [batch.pairs[place] for place in microbatch.pairs]


def _most_microbatches(plans: Sequence[RankPlan]) -> int:
    return max(len(plan.microbatches) for plan in plans)


def _unique_tokens(batch: StepBatch, plan: RankPlan) -> int:
    """Return a rank's tokens, of which what sequences begin with in common counts once."""
    own = [batch.samples[place].ids for one in plan.microbatches for place in one.samples]
    pairs = [batch.pairs[place] for one in plan.microbatches for place in one.pairs]
    return unique_ids([*own, *answer_sequences(pairs)])

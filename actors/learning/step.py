"""The three-channel optimizer step on tensors: a batch in one update or several.

Channels may have an update of their own after each of them. The gradients of an update are in
`update_pass`. Knows a model, its frozen reference and an optimizer, but not where batches and
teacher outputs come from.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.learning.policy_channel import PolicyChannel
from composer_mesh.actors.learning.replay_channel import ReplayChannel
from composer_mesh.actors.learning.running_call import ForeignChannel, RunningCall
from composer_mesh.actors.learning.sdpo_channel import SdpoChannel
from composer_mesh.actors.learning.update_pass import (
    ChannelGradients,
    MixtureLosses,
    TeacherOutputSource,
    TrainedChannel,
    UpdateGradients,
    UpdatePass,
    answer_sequences,
    content_of,
)
from composer_mesh.actors.learning.weight_update import (
    GradientNotFinite,
    NormNotFinite,
    WeightUpdate,
)
from composer_mesh.actors.models.backend import Optimizers
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.lora import BaseModel
from composer_mesh.actors.models.optimizer_state import StoredOptimizerState
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_sharded
from composer_mesh.channels.step import StepSums
from composer_mesh.channels.weights import ChannelWeights
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.batches import PolicySample, Skipped, StepBatch
from composer_mesh.rollouts.step_plan import (
    ForwardCounts,
    RankPlan,
    minibatches,
    plan_step,
    plan_views,
    reference_rounds,
    rounds_of,
    teacher_rounds,
)
from composer_mesh.rollouts.traces import TurnDivergences

UseOfStates = Callable[[LanguageModel, Sequence[PolicySample], HiddenStates], None]
"""What is done with the states of some samples."""


class OptimizerStep:
    """Owns a model's optimizer; `reference` is frozen, or None if the loss needs none.

    It may be the model itself, whose adapters are then off in the reference's forwards.

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
            kind = BaseModel if reference is model else LanguageModel
            frozen = kind(reference, self._packed, self._sharing)
        self._policy = PolicyChannel(config, frozen, custom)
        self._sdpo = SdpoChannel(config.sdpo, config.run.steps)
        replay = ReplayChannel(config.replay, self._budget)
        custom = custom or RunningCall(config.supervision.custom_function_s)
        others = [
            ForeignChannel(name, section, config.generator.temperature, custom)
            for name, section in config.channels.items()
            if section.on
        ]
        self._channels: list[TrainedChannel] = [self._policy, self._sdpo, replay, *others]
        self._weights = ChannelWeights(config)
        self._experts = MixtureLosses(config.trainer.moe)
        self._update = WeightUpdate(model, config, self._ranks, optimizers)
        self._own_updates = {
            name: WeightUpdate(model, config, self._ranks, optimizers)
            for name in config.own_updates
        }
        self._shared = [one for one in self._channels if one.name not in self._own_updates]
        self._gradients = ChannelGradients(model, self._update.weights, config, self._ranks)
        self._microbatches = UpdateGradients(self._experts, self._sharing)
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
        """Return this rank's part of the optimizers' state; shares its memory."""
        found = self._update.optimizer_state()
        for channel, update in self._own_updates.items():
            own = update.optimizer_state()
            found |= {f"{OWN}{channel}/{name}": state for name, state in own.items()}
        return found

    def device_state(self) -> list[Tensor]:
        """Clear the gradients; return the optimizers' state on the device."""
        self._update.begin()
        updates = (self._update, *self._own_updates.values())
        return [state for update in updates for state in update.device_state()]

    def restore(self, figures: dict[str, Any], optimizer_state: StoredOptimizerState) -> None:
        """Restore a checkpoint's state, written by any number of ranks."""
        self._update.restore(figures["trained"], _StateOf(optimizer_state, ""))
        for channel, update in self._own_updates.items():
            update.restore(figures["trained"], _StateOf(optimizer_state, f"{OWN}{channel}/"))
        self._sdpo.taid.load_state_dict(figures["taid"])
        self._weights.load_state_dict(figures["channel_weights"])

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
        """Return the batches of the shared updates."""
        return [_shared_part(part, self._own_updates) for part in self._whole_parts(batch)]

    def _whole_parts(self, batch: StepBatch) -> list[StepBatch]:
        trainer = self._config.trainer
        return minibatches(batch, trainer.updates_per_batch, trainer.epochs)

    def _rounds(self, batch: StepBatch, plans: Sequence[RankPlan]) -> ForwardCounts:
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
        Raises `GradientNotFinite` for an update, on all ranks.
        """
        if self._config.sdpo.on and batch.views and source is None:
            raise ValueError(f"step {batch.step} has {len(batch.views)} views but no signal")
        parts, first, sums = self._parts(batch), 0, list[StepSums]()
        norms, rate, lost = list[float](), 0.0, False
        divergences: dict[tuple[str, int], TurnDivergences] = {}
        self._policy.begin_step()
        weights = self._weights.of(batch.step)
        once = parts[: len(parts) // self._config.trainer.epochs]
        if self._policy.needs_start(len(parts)):
            self._before_updates(once, self._policy.remember, replayed=True)
            self._policy.remembered(self._ranks)
        if self._experts.compares(batch.step):
            self._before_updates(once, self._policy.note_without_replay, replayed=False)
        for part, whole in zip(parts, self._whole_parts(batch), strict=True):
            plans, measured = self._plans(part), self._policy.measured()
            done = self._accumulate(part, plans, None if lost else source, first, weights)
            if self._ranks.any(done.lost):
                lost = True
                self._policy.forget_since(measured)
                done = self._accumulate(part, plans, None, first, weights)
            divergences = {(one.trace_id, one.turn): one for one in done.divergences} | divergences
            sums.append(StepSums.of_ranks(self._ranks.of_shares(done.sums.read())))
            shares = self._gradients.finish()
            sums[-1].figures.update(shares or {})
            try:
                norm, rate = self._update.apply(
                    batch.step, nothing if norms else before_update, summed=shares is not None
                )
            except NormNotFinite as error:
                raise self._not_finite(batch.step, done, error) from None
            norms.append(norm)
            self._update_own(whole, weights, sums[-1])
            made_progress(f"update {len(norms)} of {len(parts)} of step {batch.step + 1}")
            self._policy.updated()
            first += _most_microbatches(plans)
        self.divergences = list(divergences.values()) if self._ranks.first_of_share else []
        total = sums[0] if len(sums) == 1 else StepSums.of_updates(sums)
        if lost:
            total.figures["sdpo/lost_steps"] = 1
        if len(sums) > 1:
            total.figures["policy/updates"] = len(sums)
        return {
            **self._metrics(batch, total, weights),
            "policy/grad_norm": sum(norms) / len(norms),
            "policy/lr": rate,
            "tokens/trained": batch.action_tokens,
            "tokens/skipped": batch.skipped.tokens,
        }

    def _update_own(self, part: StepBatch, weights: Mapping[str, float], sums: StepSums) -> None:
        """Run the channels' own updates of a part; add their losses and figures to the sums.

        A loss keeps its weight's peak: AdamW's steps do not shrink with the loss, so that the rate
        follows the schedule.
        """
        for name, update in self._own_updates.items():
            channel = next(one for one in self._channels if one.name == name)
            batch = _own_part(part, name)
            if not (batch.samples or batch.pairs) or not weights[name]:
                continue
            peak, plans = self._config.weighted_channels[name].peak, self._plans(batch)
            done = self._accumulate(batch, plans, None, 0, {**weights, name: peak}, channel)
            found = StepSums.of_ranks(self._ranks.of_shares(done.sums.read()))
            try:
                norm, rate = update.apply(batch.step, nothing, share=weights[name] / peak)
            except NormNotFinite as error:
                raise self._not_finite(batch.step, done, error) from None
            sums.losses |= found.losses
            for figure, value in found.figures.items():
                sums.figures[figure] += value
            sums.figures |= {f"{name}/grad_norm": norm, f"{name}/lr": rate}

    def _not_finite(self, step: int, done: UpdatePass, why: NormNotFinite) -> GradientNotFinite:
        """Return the error of an update with the evidence of all ranks, which all have it."""
        found = [one for rank in self._ranks.gather(done.checks.found()) for one in rank]
        weights = sum(self._ranks.gather(self._update.not_finite()))
        return GradientNotFinite(
            step, why.norm, why.rate, weights, self._gradients.norms, list(dict.fromkeys(found))
        )

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
                    samples, pairs = content_of(part, microbatch)
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
        weights: Mapping[str, float],
        own: TrainedChannel | None = None,
    ) -> UpdatePass:
        """Accumulate the gradients of this rank's share of an update, starting from zero.

        It is the shared one, or that of a channel's `own`.
        """
        plan, rounds = plans[self._ranks.share], self._rounds(batch, plans)
        one = UpdatePass(
            batch,
            source,
            plan,
            rounds,
            batch.counts(),
            first,
            self._shared if own is None else [own],
            weights,
            self._model,
            self._gradients,
            self._ranks,
            self._sharded,
        )
        if self._sharded and self._policy.has_reference:
            one.reference = reference_rounds(batch, plans, self._sharing)
        self._update.begin()
        self._gradients.begin(batch.step, weights, measured=own is None)
        self._microbatches.accumulate(one)
        return one

    def _metrics(
        self, batch: StepBatch, sums: StepSums, weights: Mapping[str, float]
    ) -> dict[str, float | None]:
        for channel in self._channels:
            loss = sums.losses.get(channel.name)
            sums.figures.update(channel.finish_step(loss, batch.step, self._ranks))
        sums.figures.update(self._weights.finish_step(batch, sums.figures))
        if unique := sums.figures.get("tokens/unique"):
            sums.figures["tokens/computed_over_unique"] = sums.figures["tokens/computed"] / unique
        of_channels = {
            f"{name}/{one.weight_key}": weights[name]
            for name, one in self._config.weighted_channels.items()
            if one.on
        }
        return {**sums.metrics(weights), **of_channels}


OWN = "own/"
"""What the names of the state of channels' own optimizers begin with."""


def _shared_part(part: StepBatch, own: Container[str]) -> StepBatch:
    """Return a batch without what channels train in updates of their own."""
    channels = {name: found for name, found in part.channels.items() if name not in own}
    return replace(part, channels=channels, pairs=[] if "replay" in own else part.pairs)


def _own_part(part: StepBatch, channel: str) -> StepBatch:
    """Return what a channel trains in its own update."""
    nothing_else = replace(part, views=[], channels={}, skipped=Skipped())
    if channel == "replay":
        return replace(nothing_else, samples=[])
    found = part.channels.get(channel, [])
    names = {one.trace_id for one in found}
    samples = [one for one in part.samples if one.trace_id in names]
    return replace(nothing_else, samples=samples, pairs=[], channels={channel: found})


@dataclass(frozen=True)
class _StateOf:
    """The part of stored state whose names begin with a prefix; without it, the shared update's."""

    stored: StoredOptimizerState
    prefix: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name.removeprefix(self.prefix): shape
            for name, shape in self.stored.shapes().items()
            if name.startswith(self.prefix or OWN) == bool(self.prefix)
        }

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        self.stored.read({self.prefix + name: one for name, one in tensors.items()})


def nothing() -> None:
    """Wait for nothing."""


def _most_microbatches(plans: Sequence[RankPlan]) -> int:
    return max(len(plan.microbatches) for plan in plans)

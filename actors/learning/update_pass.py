"""One pass over an update's batch: forward, channel losses and backward of each microbatch.

`TrainedChannel` is the port through which channels take part. All ranks of a sharded model run the
same number of forwards, whatever their shares. Each loss is divided by its own count over the whole
step, so microbatches and ranks simply add up.

`ChannelGradients` keeps those of an update apart by channel, to measure and to bound each channel's
share. An update that is not measured has one backward for all channels. A measured one has a
backward for each channel with data in a microbatch, through one forward, and takes memory for the
gradients of each. The total is the sum of the parts, so it differs from that of one backward by
float32 rounding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_mesh.actors.learning.weight_update import FiniteChecks, UpdatePart
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import is_dtensor, is_sharded, keep_head
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.channels.step import (
    POLICY,
    Figures,
    RunningSums,
    StepLoss,
    Term,
    step_loss,
    unread,
)
from composer_mesh.channels.weights import FREE, bounded_factors, update_bounds, update_shares
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import MoeConfig, Sharing
from composer_mesh.mesh.process_resources import return_freed_memory
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import BatchCounts, PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.prefix_tree import unique_ids
from composer_mesh.rollouts.step_plan import ForwardCounts, Microbatch, RankPlan, pair_sides
from composer_mesh.rollouts.traces import TurnDivergences

Gradients = list[Tensor | None]


class ChannelGradients:
    """Owns the gradients of a model's weights from the first backward of an update to its end.

    All ranks measure the same updates. Those of a sharded model run equally many backwards for
    each channel, whatever data they have.
    """

    def __init__(
        self, model: Any, weights: Mapping[str, Tensor], config: Config, ranks: Ranks
    ) -> None:
        self._model, self._ranks, self._sharded = model, ranks, is_sharded(model)
        self._weights: Sequence[Any] = list(weights.values())
        self._every = config.trainer.update_share_every
        self._bounds = update_bounds(config)
        self._peaks = {name: one.peak for name, one in config.weighted_channels.items()}
        self._current_bounds: dict[str, tuple[float, float]] = {}
        sections, own = config.weighted_channels.items(), config.own_updates
        self._channels = [POLICY, *(n for n, one in sections if one.on and n not in own)]
        self._apart: dict[str, Gradients] | None = None
        self.norms: dict[str, float] = {}
        """Norms of the channels' gradients in the last update that was measured."""
        if self._bounds or self._every:
            # What is compiled later gives its buffers away in the backward, unless this is set.
            torch._functorch.config.donated_buffer = False

    def measures(self, step: int) -> bool:
        """Whether the updates of a step (0-based) are measured: all of them if there are bounds."""
        return bool(self._bounds) or (self._every > 0 and step % self._every == 0)

    def begin(self, step: int, channel_weights: Mapping[str, float], measured: bool = True) -> None:
        """Forget what an aborted update left; its gradients are cleared by the caller.

        A channel's own update is not `measured`.

        `channel_weights` are those of the step. Where a schedule has lowered one, the channel's
        bounds are lowered by the same factor.
        """
        self._apart, self.norms = None, {}
        factors = {name: channel_weights[name] / self._peaks[name] for name in self._bounds}
        self._current_bounds = {
            name: (low * factors[name], high * factors[name] if high < FREE[1] else high)
            for name, (low, high) in self._bounds.items()
            if factors[name] > 0
        }
        if measured and self.measures(step):
            self._apart = {name: [None] * len(self._weights) for name in self._channels}

    def backward(self, losses: StepLoss, states: Tensor | None = None) -> None:
        """Add the gradients of a microbatch: with one backward, or with one for each channel.

        `states` are those of the forward that the losses have in common.
        """
        if self._apart is None:
            losses.total().backward()
            return
        parts = losses.by_channel()
        if self._sharded:
            zero = _zero(losses, states)
            parts = {n: zero + parts[n] if n in parts else zero for n in self._channels}
        left = len(parts)
        for name, loss in parts.items():
            left -= 1
            keep_head(self._model, left > 0)
            with self.of(name):
                loss.backward(retain_graph=left > 0)

    @contextmanager
    def of(self, channel: str) -> Iterator[None]:
        """Count the gradients of a `with` block to a channel."""
        if self._apart is None:
            yield
            return
        self._show(self._apart[channel])
        yield
        self._apart[channel] = [one.grad for one in self._weights]
        self._show([None] * len(self._weights))

    @torch.no_grad()
    def finish(self) -> dict[str, float] | None:
        """Leave the update's gradients, summed over ranks, on the weights; return their figures.

        Returns None for an update that is not measured, whose gradients are left as they are.
        Collective. Norms that are not finite are left to the update, which refuses them.
        """
        if self._apart is None:
            return None
        norms = self._ranks.gather({name: self._summed(name) for name in self._channels})[0]
        self.norms = norms
        factors = dict.fromkeys(norms, 1.0)
        finite = all(map(math.isfinite, norms.values()))
        if self._bounds and finite:
            factors = bounded_factors(norms, self._current_bounds)
        parts = [(factors[name], self._apart[name]) for name in self._channels]
        self._show([_combined(place, parts) for place in range(len(self._weights))])
        self._apart = None
        return self._figures(norms, factors) if finite else {}

    def _summed(self, channel: str) -> float:
        """Sum a channel's gradients over ranks, and return their norm."""
        assert self._apart is not None
        self._show(self._apart[channel])
        self._ranks.sum_gradients(one for one in self._weights if not is_dtensor(one))
        found = self._apart[channel] = [one.grad for one in self._weights]
        self._show([None] * len(self._weights))
        norm: Any = torch.nn.utils.get_total_norm([one for one in found if one is not None])
        return float(norm.full_tensor() if is_dtensor(norm) else norm)

    def _figures(
        self, norms: Mapping[str, float], factors: Mapping[str, float]
    ) -> dict[str, float]:
        shares = update_shares({name: factors[name] * norm for name, norm in norms.items()})
        return {
            **{f"update/norm_{name}": norm for name, norm in norms.items()},
            **{f"update/share_{name}": share for name, share in shares.items()},
            **{f"update/scale_{name}": factors[name] for name in self._bounds},
        }

    def _show(self, gradients: Gradients) -> None:
        for weights, gradient in zip(self._weights, gradients, strict=True):
            weights.grad = gradient


def _combined(place: int, parts: Sequence[tuple[float, Gradients]]) -> Tensor | None:
    """Return the sum of the channels' gradients of a weight, which takes the memory of the first.

    None if no channel has one.
    """
    total: Tensor | None = None
    for factor, gradients in parts:
        gradient = gradients[place]
        if gradient is None:
            continue
        if total is None:
            total = gradient if factor == 1 else gradient.mul_(factor)
        else:
            total = total.add_(gradient, alpha=factor)
        gradients[place] = None
    return total


def _zero(losses: StepLoss, states: Tensor | None) -> Tensor:
    """Return a zero whose backward passes through every forward of the microbatch."""
    of_states = [] if states is None else [states.sum()]
    return 0 * torch.stack([*of_states, *losses.others]).sum()


Choose = Callable[[], Tensor]


class TeacherOutputSource(Protocol):
    """Port that returns the teacher output for the views of one microbatch; `take` may block.

    `choose` computes the student's top k ids [N, K], for configurations in which the student
    chooses.
    """

    def take(
        self, microbatch: int, views: Sequence[HintedView], choose: Choose, /
    ) -> TeacherOutput: ...

    def skip(self, microbatch: int, /) -> None:
        """Take part in collectives for a microbatch without views on this rank.

        Only a source that communicates with other ranks, such as a sharded teacher, does anything
        here.
        """


@dataclass
class UpdatePass:
    """One pass over an update's batch; without a source it trains no SDPO channel.

    The source counts microbatches through the step; `first` is the number of the first one here.
    `channels` take part, and `weights` are those of the channels in this step, by name.
    """

    batch: StepBatch
    source: TeacherOutputSource | None
    plan: RankPlan
    rounds: ForwardCounts
    counts: BatchCounts
    first: int
    channels: "Sequence[TrainedChannel]"
    weights: Mapping[str, float]
    model: LanguageModel
    gradients: ChannelGradients
    ranks: Ranks
    sharded: bool
    reference: list[int] = field(default_factory=list)
    """Forwards of a sharded reference in each microbatch; empty for one on this rank alone."""
    sums: RunningSums = field(default_factory=RunningSums)
    divergences: list[TurnDivergences] = field(default_factory=list)
    checks: FiniteChecks = field(default_factory=FiniteChecks)
    lost: bool = False

    def losses(self, terms: Mapping[str, Term], others: Sequence[Tensor] = ()) -> StepLoss:
        """Compute the losses of some data, and add them to the sums."""
        found = step_loss(terms, self.weights, others)
        self.sums.add(found.losses)
        return found

    def end_part(self, part: UpdatePart) -> None:
        """Note what a part has computed, and report it as progress; on a CPU free its memory."""
        if self.model.device.type == "cpu":
            return_freed_memory()
        self.checks.note(part, self.sums.losses)
        made_progress(f"{part.name} of step {self.batch.step + 1}")


@dataclass(frozen=True)
class MicrobatchStates:
    """The data of one microbatch of a pass, and the states of its sequences.

    Without samples or pairs it has no states of them.
    """

    one: UpdatePass
    index: int
    microbatch: Microbatch
    samples: list[PolicySample] = field(default_factory=list)
    pairs: list[PairSample] = field(default_factory=list)
    of_samples: HiddenStates | None = None
    of_pairs: HiddenStates | None = None


class TrainedChannel(ABC):
    """A channel of the trainer's step. All ranks call the same methods, whatever data they have."""

    name: str

    @abstractmethod
    def term(self, states: MicrobatchStates, /) -> Tensor | None:
        """Return the unweighted loss of a microbatch, divided by the step's normalizer."""

    def train_rest(self, one: UpdatePass, /) -> None:  # noqa: B027 most have no such data
        """Add the gradients of data that is in no microbatch."""

    def finish_step(self, _loss: float | None, _step: int, _ranks: Ranks, /) -> Figures:
        """Return the metrics of a step (0-based) with this loss; None for a step without data."""
        return {}


def content_of(
    batch: StepBatch, microbatch: Microbatch
) -> tuple[list[PolicySample], list[PairSample]]:
    """Return the samples and pairs of a microbatch."""
    samples = [batch.samples[place] for place in microbatch.samples]
    return samples, [batch.pairs[place] for place in microbatch.pairs]


def answer_sequences(pairs: Sequence[PairSample]) -> list[list[int]]:
    """Return the ids of the chosen sides of some pairs, then of the rejected ones."""
    sides = [pair_sides(pair) for pair in pairs]
    return [side[0] for side in sides] + [side[1] for side in sides]


class MixtureLosses:
    """Computes the load-balancing loss of microbatches, from the routing of their forward."""

    def __init__(self, config: MoeConfig) -> None:
        self._config = config

    def compares(self, step: int) -> bool:
        """Whether a step also measures the mismatch without router replay."""
        every = self._config.compare_every
        return self._config.router_replay and every > 0 and step % every == 0

    def loss(
        self,
        model: LanguageModel,
        samples: Sequence[PolicySample],
        batch: StepBatch,
        figures: dict[str, Any],
    ) -> Tensor | None:
        """Return the weighted loss of the forward that a model has just run; None without any.

        It is the microbatch's, times its share of the tokens of the batch. Adds the figures
        `moe/balance_loss`, a mean over layers that is 1 if all experts are equally busy, and
        `moe/rerouted`, the share of replayed choices that are not the trainer's own.
        """
        routing = model.routing
        if routing is None or not samples:
            return None
        if routing.given is not None:
            positions = sum(one.experts.positions for one in batch.samples if one.experts)
            choices = positions * routing.given.shape[1] * routing.given.shape[2]
            figures["moe/rerouted"] += routing.rerouted_choices() / choices
        share = sum(len(one.ids) for one in samples) / sum(len(one.ids) for one in batch.samples)
        loss = share * routing.balance_loss()
        figures["moe/balance_loss"] += unread(loss) / len(routing.logits)
        return self._config.load_balancing * loss if self._config.load_balancing else None


class UpdateGradients:
    """Accumulates the gradients of this rank's share of an update."""

    def __init__(self, experts: MixtureLosses, sharing: Sharing) -> None:
        self._experts, self._sharing = experts, sharing

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
        for channel in one.channels:
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
        balance = None
        if any(channel.name == POLICY for channel in one.channels):
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
        losses = one.losses({each.name: partial(each.term, states) for each in one.channels}, alone)
        part = UpdatePart.of(_microbatch(index, one.rounds), samples, pairs)
        one.checks.watch(part, hidden.computed)
        one.gradients.backward(losses, hidden.computed)
        one.end_part(part)

    def _dummy_forward(self, index: int, one: UpdatePass) -> None:
        """Run the models as often as ranks that have a microbatch of this index."""
        alone = [one.model.dummy_forward() for _ in range(one.rounds.trained[index])]
        states = MicrobatchStates(one, index, Microbatch([], []))
        for channel in one.channels:
            channel.term(states)
        one.gradients.backward(StepLoss(others=alone))


def _microbatch(index: int, rounds: ForwardCounts) -> str:
    return f"microbatch {index + 1} of {rounds.microbatches}"


def _unique_tokens(batch: StepBatch, plan: RankPlan) -> int:
    """Return a rank's tokens, of which what sequences begin with in common counts once."""
    own = [batch.samples[place].ids for one in plan.microbatches for place in one.samples]
    pairs = [batch.pairs[place] for one in plan.microbatches for place in one.pairs]
    return unique_ids([*own, *answer_sequences(pairs)])

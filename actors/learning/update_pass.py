"""One pass over an update's batch: forward, channel losses and backward of each microbatch.

`TrainedChannel` is the port through which channels take part. All ranks of a sharded model run the
same number of forwards, whatever their shares. Each loss is divided by its own count over the whole
step, so microbatches and ranks simply add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor

from composer_mesh.actors.learning.channel_gradients import ChannelGradients
from composer_mesh.actors.learning.weight_update import FiniteChecks, UpdatePart
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.channels.step import POLICY, Figures, StepLoss, StepSums, Term, step_loss
from composer_mesh.configs.trainer import MoeConfig, Sharing
from composer_mesh.mesh.process_resources import return_freed_memory
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import BatchCounts, PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.prefix_tree import unique_ids
from composer_mesh.rollouts.step_plan import ForwardCounts, Microbatch, RankPlan, pair_sides
from composer_mesh.rollouts.traces import TurnDivergences

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
    sums: StepSums = field(default_factory=StepSums)
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
        figures: Figures,
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
        figures["moe/balance_loss"] += float(loss.detach()) / len(routing.logits)
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

"""One pass over an update's batch, and the port through which its channels take part.

Each loss is divided by its own count over the whole step, so microbatches and ranks simply add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from composer_mesh.actors.learning.channel_gradients import ChannelGradients
from composer_mesh.actors.learning.not_finite import FiniteChecks, Part
from composer_mesh.actors.models.hidden_states import HiddenStates
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.teacher_outputs.messages import TeacherOutput
from composer_mesh.channels.step import Figures, StepLoss, StepSums, Term, step_loss
from composer_mesh.mesh.process_resources import return_freed_memory
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import BatchCounts, PairSample, PolicySample, StepBatch
from composer_mesh.rollouts.step_plan import Microbatch, RankPlan, Rounds
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
    rounds: Rounds
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

    def end_part(self, part: Part) -> None:
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

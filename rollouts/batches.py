"""Training batch of one optimizer step: the samples of the three channels as plain lists of ids.

Batches are built from traces by pure functions in the controller; the trainer creates tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.hint_sources import (
    HintCounts,
)
from composer_mesh.rollouts.traces import ExpertChoices, Trace

Advantage = float | list[float]
"""One number for all turns of a trajectory, or one for each."""


@dataclass(frozen=True, slots=True)
class PolicySample:
    """A trace with its advantage. `mask` is True at trained ids; `logprobs` is 0 elsewhere.

    `versions` holds the policy version that sampled each id, -1 for ids that no policy sampled or
    that are not trained; `group_id` is that of the trace.
    `advantage` is one number, or a list with one for each id, which is 0 where none is trained.
    """

    trace_id: str
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float | list[float]
    versions: list[int]
    group_id: int = 0
    experts: ExpertChoices | None = None
    """Those of all positions but the last, for router replay."""

    @property
    def is_zero(self) -> bool:
        """Whether no trained id has an advantage other than 0."""
        if isinstance(self.advantage, list):
            return not any(self.advantage)
        return self.advantage == 0


@dataclass(frozen=True, slots=True)
class PairSample:
    """A preference pair as ids: one context with a chosen and a rejected answer.

    `reference` holds the summed log-probs of the chosen and the rejected answer under the frozen
    policy. `weight` multiplies the pair's loss.
    """

    pair_id: str
    context_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    reference: tuple[float, float] | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ChannelSample:
    """What a channel of a user's trains of a trajectory: a value for each id, 0 where nothing."""

    trace_id: str
    values: list[float]


@dataclass(frozen=True, slots=True)
class Skipped:
    """Samples that are left out of a batch because their loss is 0, but count in its normalizer.

    `tokens` counts sampled ones.
    """

    sequences: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What the losses of a step are normalized by, counted once: over all microbatches and ranks.

    `sequences` and `action_tokens` count the skipped samples too.
    """

    version: int
    sequences: int
    action_tokens: int
    sdpo_tokens: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Data of one optimizer step. `views` belong to samples of the same batch, in a fixed order.

    `hints` counts the outcomes of the hints; it is None if the SDPO channel is off. `sequences` and
    `action_tokens` count the skipped samples too. `success` is the share of the step's rollouts
    that succeeded, `agreement` that of the states at which the teachers' majority did what the
    student did; None where there were none.
    """

    step: int
    samples: list[PolicySample]
    views: list[HintedView]
    pairs: list[PairSample]
    hints: HintCounts | None = None
    skipped: Skipped = Skipped()
    success: float | None = None
    agreement: float | None = None
    channels: Mapping[str, Sequence[ChannelSample]] = field(default_factory=dict)
    """Samples of the channels that are not ours, by name; each belongs to a sample of the batch."""
    oldest: int | None = None
    """Version of the oldest tokens that are trained; None if the rollout window alone bounds it."""

    @property
    def version(self) -> int:
        """Policy version that the step trains: the step number, as each step makes one version."""
        return self.step

    def check_trains(self, version: int) -> None:
        """Raise ValueError unless the step trains this policy version."""
        if self.version != version:
            raise ValueError(
                f"the batch of step {self.step} trains version {self.version} of the policy, which "
                f"is at version {version}: train the batches in order, each once"
            )

    @property
    def refused_hints(self) -> int:
        """Number of hints that leaked the answer or did not fit into the context."""
        return self.hints.refused + self.hints.too_long if self.hints else 0

    @property
    def sequences(self) -> int:
        return len(self.samples) + self.skipped.sequences

    @property
    def action_tokens(self) -> int:
        return sum(sum(sample.mask) for sample in self.samples) + self.skipped.tokens

    @property
    def sdpo_tokens(self) -> int:
        return sum(len(view.targets) for view in self.trained_views)

    @property
    def trained_views(self) -> list[HintedView]:
        """The views that are distilled, without those that are only compared."""
        return [view for view in self.views if not view.compared]

    def counts(self) -> BatchCounts:
        """Count the batch; takes time in proportion to its tokens."""
        return BatchCounts(self.version, self.sequences, self.action_tokens, self.sdpo_tokens)


def by_group(traces: Iterable[Trace]) -> dict[int, list[Trace]]:
    """Group rollouts by prompt, in input order."""
    groups: dict[int, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group_id, []).append(trace)
    return groups

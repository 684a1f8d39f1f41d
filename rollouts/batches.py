"""Training batch of one optimizer step: the samples of the three channels as plain lists of ids.

Batches are built from traces by pure functions in the controller; the trainer creates tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from composer_mesh.configs.replay import PairWeight
from composer_mesh.configs.sdpo import HintsConfig, SitesConfig
from composer_mesh.rollouts.alignment import HintedView, compared_view, hinted_view
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.expert_choices import ExpertChoices
from composer_mesh.rollouts.hint_sources import (
    Hint,
    HintCounts,
    HintSources,
    Place,
    Written,
    ordered_sites,
    right_sibling,
)
from composer_mesh.rollouts.hints import TEMPLATES, HintTemplates
from composer_mesh.rollouts.pairs import PreferencePair, teachers_margin
from composer_mesh.rollouts.traces import Trace

Advantage = float | list[float]
"""One number for all turns of a trajectory, or one for each."""


@dataclass(frozen=True, slots=True)
class PolicySample:
    """A trace with its advantage. `mask` is True at trained ids; `logprobs` is 0 elsewhere.

    `versions` holds the policy version that sampled each id, -1 for ids that are not trained;
    `group_id` is that of the trace.
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


def policy_sample(trace: Trace, advantage: Advantage) -> PolicySample:
    """Convert a trace to a sample; ids that were not sampled get log-prob 0 and version -1.

    A list has the advantage of each turn, which all of its trained ids get.
    """
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trace.turns:
        trained = turn.trained
        logprobs += [0.0] * len(turn.context_ids)
        logprobs += turn.logprobs if trained else [0.0] * len(turn.action_ids)
        versions += [-1] * len(turn.context_ids)
        versions += turn.versions if trained else [-1] * len(turn.action_ids)
    return PolicySample(
        trace.trace_id,
        trace.token_ids(),
        trace.action_mask(),
        logprobs,
        _by_id(trace, advantage) if isinstance(advantage, list) else advantage,
        versions,
        trace.group_id,
        trace.expert_choices(),
    )


def _by_id(trace: Trace, advantages: Sequence[float]) -> list[float]:
    """Return the advantage of each id from those of the turns; 0 where none is trained."""
    runs = (
        chain(repeat(0.0, len(turn.context_ids)), repeat(own * turn.trained, len(turn.action_ids)))
        for turn, own in zip(trace.turns, advantages, strict=True)
    )
    return list(chain.from_iterable(runs))


def without_zero_advantages(
    samples: Sequence[PolicySample], others: Iterable[HintedView | ChannelSample]
) -> tuple[list[PolicySample], Skipped]:
    """Leave out the samples with advantage 0 that no other belongs to, and count them."""
    trained = {one.trace_id for one in others}
    skipped = [one for one in samples if one.is_zero and one.trace_id not in trained]
    kept = [one for one in samples if not one.is_zero or one.trace_id in trained]
    return kept, Skipped(len(skipped), sum(sum(sample.mask) for sample in skipped))


@dataclass(frozen=True, slots=True)
class HintedSites:
    """Hinted error sites of a step, then compared ones, with the outcome counts of all hints."""

    views: list[HintedView]
    counts: HintCounts

    @property
    def refused(self) -> int:
        """Number of hints that leaked the answer or did not fit into the context."""
        return self.counts.refused + self.counts.too_long


def hinted_sites(
    traces: Sequence[Trace],
    chat: ChatFormat,
    answer_of: Callable[[Trace], str | None],
    limit: int,
    max_context: int,
    config: HintsConfig | None = None,
    written: Mapping[Place, Written] | None = None,
    templates: HintTemplates = TEMPLATES,
    choice: SitesConfig | None = None,
) -> HintedSites:
    """Return the first `limit` hinted turns of the traces, as the student and the teacher see them.

    Hints that contain the verified answer and hinted contexts longer than `max_context` are
    refused; the turn's next hint is tried instead. Turns are taken in the order of `choice`, unless
    stated round-robin over the traces, so that one trace with many errors does not fill the step.
    `written` maps places to texts of a hint writer.
    """
    choice = choice or SitesConfig()
    sources = hint_sources(chat, answer_of, config or HintsConfig(), written or {}, templates)
    groups = by_group(traces)
    found = HintedSites([], HintCounts())
    compared: dict[Place, HintedView] = {}
    for trace, turn in ordered_sites(
        traces, lambda trace: sources.turns(trace, groups[trace.group_id]), choice.sites
    ):
        if len(found.views) >= limit:
            break
        if turn < len(trace.turns) and not trace.turns[turn].action_ids:
            continue  # nothing was sampled there, so there is nothing to teach
        hints = sources.hints(trace, turn, groups[trace.group_id], found.counts)
        view = _view(trace, hints, chat, max_context, found.counts)
        if view is None:
            continue
        found.views.append(view)
        if len(compared) < choice.advantage_sites:
            other = _compared(view, trace, groups[trace.group_id], choice, max_context)
            if other is not None:
                compared.setdefault((other.trace_id, other.turn), other)
    own = {(view.trace_id, view.turn) for view in found.views}
    found.views.extend(view for place, view in compared.items() if place not in own)
    return found


def _compared(
    view: HintedView,
    trace: Trace,
    group: Sequence[Trace],
    choice: SitesConfig,
    max_context: int,
) -> HintedView | None:
    """Return the view of a right action of the group in a view's contexts; None if none fits."""
    sibling = right_sibling(trace, view.turn, group, choice.right_action)
    if sibling is None:
        return None
    found = compared_view(view, sibling.trace_id, sibling.turns[view.turn].action_ids)
    return found if len(found.teacher_ids) <= max_context else None


def hint_sources(
    chat: ChatFormat,
    answer_of: Callable[[Trace], str | None],
    config: HintsConfig,
    written: Mapping[Place, Written],
    templates: HintTemplates = TEMPLATES,
) -> HintSources:
    """Build the configured hint sources, with the config's templates added to those of the task."""
    templates = templates.extended(config.templates) if config.templates else templates
    return HintSources(config, answer_of, chat.content_tokens, templates, written)


def by_group(traces: Iterable[Trace]) -> dict[int, list[Trace]]:
    """Group rollouts by prompt, in input order."""
    groups: dict[int, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group_id, []).append(trace)
    return groups


def _view(
    trace: Trace, hints: Iterable[Hint], chat: ChatFormat, max_context: int, counts: HintCounts
) -> HintedView | None:
    """Return the view of a turn with its first hint that fits into `max_context`, else None."""
    for hint in hints:
        view = hinted_view(trace, hint.turn, chat.hint(hint.text), chat.generation_prompt)
        if len(view.teacher_ids) <= max_context:
            counts.show(hint.wording or hint.source)
            return view
        counts.too_long += 1
    return None


def pair_samples(
    pairs: Sequence[PreferencePair],
    chat: ChatFormat,
    max_context: int,
    weight: PairWeight = "none",
) -> list[PairSample]:
    """Convert pairs to ids, encoding the chosen text once; drop pairs longer than `max_context`.

    With the weight "margin" each pair weighs what the teachers' margin is.
    """
    samples = [
        PairSample(
            p.pair_id,
            p.context_ids,
            chat.action(p.chosen_text),
            p.rejected_ids,
            p.reference,
            teachers_margin(p) if weight == "margin" else 1.0,
        )
        for p in pairs
    ]
    return [
        sample
        for sample in samples
        if len(sample.context_ids) + max(len(sample.chosen_ids), len(sample.rejected_ids))
        <= max_context
    ]

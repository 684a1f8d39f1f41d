"""What one optimizer step trains on: the three channels' samples, as plain lists of ids.

Building them from traces is pure and happens in the controller; tensors come later, in the trainer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from composer_mesh.configs.hints import HintsConfig
from composer_mesh.rollouts.alignment import HintedView, hinted_view
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_counts import HintCounts
from composer_mesh.rollouts.hint_sources import Hint, HintSources, Place, Written, rounds
from composer_mesh.rollouts.hints import TEMPLATES
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace


@dataclass(frozen=True, slots=True)
class PolicySample:
    """A trace with its advantage. `mask` is True at sampled ids; `logprobs` is 0 elsewhere.

    `versions` holds the policy version that sampled each id, -1 where none did.
    """

    trace_id: str
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float
    versions: list[int]


@dataclass(frozen=True, slots=True)
class PairSample:
    """A preference pair as ids: one context, two answers.

    `reference` holds the frozen policy's summed log-probs of the chosen and the rejected answer.
    """

    pair_id: str
    context_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    reference: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step. `views` belong to samples of the same batch, in a fixed order.

    `hints` says what became of the hints, None where the channel is off.
    """

    step: int
    samples: list[PolicySample]
    views: list[HintedView]
    pairs: list[PairSample]
    hints: HintCounts | None = None

    @property
    def version(self) -> int:
        """The policy version that the step trains: each step before it has made one."""
        return self.step

    @property
    def refused_hints(self) -> int:
        """Hints that told the answer or did not fit."""
        return self.hints.refused + self.hints.too_long if self.hints else 0

    @property
    def action_tokens(self) -> int:
        return sum(sum(sample.mask) for sample in self.samples)

    @property
    def sdpo_tokens(self) -> int:
        return sum(len(view.targets) for view in self.views)


def policy_sample(trace: Trace, advantage: float) -> PolicySample:
    """A trace as a sample; what was not sampled has log-prob 0 and version -1."""
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in trace.turns:
        logprobs += [0.0] * len(turn.context_ids) + turn.logprobs
        versions += [-1] * len(turn.context_ids) + turn.versions
    return PolicySample(
        trace.trace_id,
        trace.token_ids(),
        trace.action_mask(),
        logprobs,
        advantage,
        versions,
    )


@dataclass(frozen=True, slots=True)
class HintedSites:
    """The error sites of a step that the teacher sees, and what became of all hints."""

    views: list[HintedView]
    counts: HintCounts

    @property
    def refused(self) -> int:
        """Hints that told the answer or did not fit."""
        return self.counts.refused + self.counts.too_long


def hinted_sites(
    traces: Sequence[Trace],
    chat: ChatFormat,
    answer_of: Callable[[Trace], str],
    limit: int,
    max_context: int,
    config: HintsConfig | None = None,
    written: Mapping[Place, Written] | None = None,
) -> HintedSites:
    """The first `limit` hinted turns of the traces, as student and teacher see them.

    Refused are hints that hold the verified answer, and hinted contexts longer than `max_context`;
    the turn's next hint is tried then. Turns are taken round by round over the traces, so that one
    trace full of errors does not fill the step. `written` holds a writer's words by place.
    """
    sources = hint_sources(chat, answer_of, config or HintsConfig(), written or {})
    groups = by_group(traces)
    found = HintedSites([], HintCounts())
    for trace, turn in rounds(traces, lambda trace: sources.turns(trace, groups[trace.group_id])):
        if len(found.views) >= limit:
            break
        hints = sources.hints(trace, turn, groups[trace.group_id], found.counts)
        view = _view(trace, hints, chat, max_context, found.counts)
        if view is not None:
            found.views.append(view)
    return found


def hint_sources(
    chat: ChatFormat,
    answer_of: Callable[[Trace], str],
    config: HintsConfig,
    written: Mapping[Place, Written],
) -> HintSources:
    """The sources as a config wants them, with its own templates beside the built-in ones."""
    templates = TEMPLATES.extended(config.templates) if config.templates else TEMPLATES
    return HintSources(config, answer_of, chat.content_tokens, templates, written)


def by_group(traces: Iterable[Trace]) -> dict[int, list[Trace]]:
    """The rollouts of each prompt, in the order in which they come."""
    groups: dict[int, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(trace.group_id, []).append(trace)
    return groups


def _view(
    trace: Trace, hints: Iterable[Hint], chat: ChatFormat, max_context: int, counts: HintCounts
) -> HintedView | None:
    """The view of a turn with its first hint that fits."""
    for hint in hints:
        view = hinted_view(trace, hint.turn, chat.hint(hint.text), chat.generation_prompt)
        if len(view.teacher_ids) <= max_context:
            counts.show(hint.wording or hint.source)
            return view
        counts.too_long += 1
    return None


def pair_samples(
    pairs: Sequence[PreferencePair], chat: ChatFormat, max_context: int
) -> list[PairSample]:
    """Pairs as ids; the chosen text is encoded here, once. Too long ones are left out."""
    samples = [
        PairSample(
            p.pair_id, p.context_ids, chat.action(p.chosen_text), p.rejected_ids, p.reference
        )
        for p in pairs
    ]
    return [
        sample
        for sample in samples
        if len(sample.context_ids) + max(len(sample.chosen_ids), len(sample.rejected_ids))
        <= max_context
    ]

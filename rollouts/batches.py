"""What one optimizer step trains on: the three channels' samples, as plain lists of ids.

Building them from traces is pure and happens in the controller; tensors come later, in the trainer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from composer_mesh.rollouts.alignment import HintedView, hinted_view
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hints import HintLeak, render_hint
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import ErrorSite, Trace


@dataclass(frozen=True, slots=True)
class PolicySample:
    """A trace with its advantage. `mask` is True at sampled ids; `logprobs` is 0 elsewhere."""

    trace_id: str
    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantage: float


@dataclass(frozen=True, slots=True)
class PairSample:
    """A preference pair as ids: one context, two answers."""

    pair_id: str
    context_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step. `views` belong to samples of the same batch, in a fixed order."""

    step: int
    samples: list[PolicySample]
    views: list[HintedView]
    pairs: list[PairSample]
    refused_hints: int = 0

    @property
    def action_tokens(self) -> int:
        return sum(sum(sample.mask) for sample in self.samples)

    @property
    def sdpo_tokens(self) -> int:
        return sum(len(view.targets) for view in self.views)


def policy_sample(trace: Trace, advantage: float) -> PolicySample:
    logprobs: list[float] = []
    for turn in trace.turns:
        logprobs += [0.0] * len(turn.context_ids) + turn.logprobs
    return PolicySample(
        trace.trace_id,
        trace.token_ids(),
        trace.action_mask(),
        logprobs,
        advantage,
    )


@dataclass(frozen=True, slots=True)
class HintedSites:
    """The error sites of a step that the teacher sees, and how many hints were refused."""

    views: list[HintedView]
    refused: int


def hinted_sites(
    traces: Iterable[Trace],
    chat: ChatFormat,
    answer_of: Callable[[Trace], str],
    limit: int,
    max_context: int,
) -> HintedSites:
    """The first `limit` error sites of the traces, as student and teacher see them.

    Refused are hints that hold the verified answer, and hinted contexts longer than `max_context`.
    Sites are taken round by round over the traces, so that one trace full of errors does not fill
    the step.
    """
    queues = [(trace, list(trace.error_sites)) for trace in traces]
    views: list[HintedView] = []
    refused = 0
    while len(views) < limit and any(sites for _, sites in queues):
        for trace, sites in queues:
            if not sites or len(views) >= limit:
                continue
            view = _view(trace, sites.pop(0), chat, answer_of(trace), max_context)
            if view is None:
                refused += 1
            else:
                views.append(view)
    return HintedSites(views, refused)


def _view(
    trace: Trace, site: ErrorSite, chat: ChatFormat, answer: str, max_context: int
) -> HintedView | None:
    try:
        hint = chat.hint(render_hint(site, answer))
    except HintLeak:
        return None
    view = hinted_view(trace, site.turn, hint, chat.generation_prompt)
    return view if len(view.teacher_ids) <= max_context else None


def pair_samples(
    pairs: Sequence[PreferencePair], chat: ChatFormat, max_context: int
) -> list[PairSample]:
    """Pairs as ids; the chosen text is encoded here, once. Too long ones are left out."""
    samples = [
        PairSample(p.pair_id, p.context_ids, chat.action(p.chosen_text), p.rejected_ids)
        for p in pairs
    ]
    return [
        sample
        for sample in samples
        if len(sample.context_ids) + max(len(sample.chosen_ids), len(sample.rejected_ids))
        <= max_context
    ]

"""The SDPO channel's samples: hinted turns of rollouts, as student and teacher see them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from composer_mesh.configs.sdpo import HintsConfig, SitesConfig
from composer_mesh.rollouts.alignment import HintedView, compared_view, hinted_view
from composer_mesh.rollouts.batches import by_group
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_sources import (
    Hint,
    HintCounts,
    HintSources,
    Place,
    WrittenHint,
    ordered_sites,
    right_sibling,
)
from composer_mesh.rollouts.hints import TEMPLATES, hint_templates
from composer_mesh.rollouts.traces import Trace, Turn


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
    written: Mapping[Place, WrittenHint] | None = None,
    templates: Mapping[str, str] = TEMPLATES,
    choice: SitesConfig | None = None,
    oldest: int | None = None,
) -> HintedSites:
    """Return the first `limit` hinted turns of the traces, as the student and the teacher see them.

    Hints that contain the verified answer and hinted contexts longer than `max_context` are
    refused; the turn's next hint is tried instead. Turns are taken in the order of `choice`, unless
    stated round-robin over the traces, so that one trace with many errors does not fill the step.
    `written` maps places to texts of a hint writer. Turns with a token of a version before `oldest`
    are left out.
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
        if turn < len(trace.turns) and not _teaches(trace.turns[turn], oldest):
            continue
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


def _teaches(turn: Turn, oldest: int | None) -> bool:
    """Whether something was sampled in a turn, and all of it is young enough to be trained."""
    return bool(turn.action_ids) and (oldest is None or min(turn.versions) >= oldest)


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
    written: Mapping[Place, WrittenHint],
    templates: Mapping[str, str] = TEMPLATES,
) -> HintSources:
    """Build the configured hint sources, with the config's templates added to those of the task."""
    known = hint_templates(templates, config.templates)
    return HintSources(config, answer_of, chat.content_tokens, known, written)


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

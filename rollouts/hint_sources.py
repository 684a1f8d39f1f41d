"""Selection of hints for a rollout: its turns, and for each turn the sources in configured order.

    error     the template of the error site, or a writer's text for it
    sibling   what a successful rollout of the same prompt did before its answer
    feedback  the environment's response to the action

Every text is truncated first and then checked for the verified answer; a hint that contains it is
counted and the next one is tried. `batches` converts hints to ids.

Outcome counts and dollars of the hints of one step.

shown     template + llm + cached + fallback  = hints of the error source
          sibling, feedback                   = hints of the other two sources
not shown refused (leaked the answer), too_long (did not fit into the context),
          unwritten (could not be made: a fact that its template names is missing)

Which error sites are hinted first, and which right actions a hinted teacher is compared at.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from composer_mesh.configs.sdpo import HintsConfig, HintSource, RightAction, Sites
from composer_mesh.rollouts.hints import (
    PREFIX,
    HintLeak,
    HintTemplateError,
    HintTemplates,
    chosen_sibling,
    exchanges,
    refuse_leak,
    render_hint,
    sibling_hint,
)
from composer_mesh.rollouts.traces import ErrorSite, Trace


@dataclass(slots=True)
class HintCounts:
    """Counts of one step. `cut` counts truncated hints, shown or too long; `requests` were paid.

    `fallback` counts templates that were used in place of a writer's text. `faults` are the reasons
    of those that are unwritten, each once.
    """

    template: int = 0
    llm: int = 0
    cached: int = 0
    fallback: int = 0
    sibling: int = 0
    feedback: int = 0
    refused: int = 0
    too_long: int = 0
    unwritten: int = 0
    cut: int = 0
    requests: int = 0
    usd: float = 0.0
    faults: dict[str, None] = field(default_factory=dict)

    @property
    def shown(self) -> int:
        own = self.template + self.llm + self.cached + self.fallback
        return own + self.sibling + self.feedback

    def show(self, what: str) -> None:
        """Count one shown hint by its wording, or by its source if it has none."""
        setattr(self, what, getattr(self, what) + 1)

    def fail(self, reason: str) -> None:
        """Count one hint that could not be written."""
        self.unwritten += 1
        self.faults[reason] = None

    def metrics(self) -> dict[str, Any]:
        """Return the counts under their `metrics.jsonl` keys."""
        counts = {name: value for name, value in asdict(self).items() if name != "faults"}
        return {f"hints/{name}": value for name, value in counts.items()}


FEEDBACK = "An earlier try at this turn was answered with:"

Wording = Literal["template", "llm", "cached", "fallback"]
Place = tuple[str, int]
"""(trace id, turn)."""


@dataclass(frozen=True, slots=True)
class WrittenHint:
    """A hint writer's text for one error site."""

    text: str
    wording: Literal["llm", "cached"]


@dataclass(frozen=True, slots=True)
class Hint:
    """A candidate hint. `wording` and `site` are set for the error source only."""

    turn: int
    source: HintSource
    text: str
    wording: Wording | None = None
    site: ErrorSite | None = None


@dataclass(frozen=True)
class HintSources:
    """Hints of rollouts, from their own data and that of their group.

    `tokens` counts the ids of a text; `answer_of` returns the verified answer of a rollout.
    """

    config: HintsConfig
    answer_of: Callable[[Trace], str | None]
    tokens: Callable[[str], int]
    templates: HintTemplates
    written: Mapping[Place, WrittenHint] = field(default_factory=dict)

    def turns(self, trace: Trace, group: Sequence[Trace]) -> list[int]:
        """Return the distinct turns of a rollout that may get a hint, in order of its errors.

        A screened rollout gets none.
        """
        found: list[int] = []
        if trace.screened:
            return found
        if "error" in self.config.sources or "feedback" in self.config.sources:
            found += [site.turn for site in trace.error_sites]
        if "sibling" in self.config.sources and _is_shown_a_sibling(trace, group):
            found.append(_sibling_turn(trace))
        return list(dict.fromkeys(found))

    def hints(
        self, trace: Trace, turn: int, group: Sequence[Trace], counts: HintCounts
    ) -> Iterator[Hint]:
        """Yield the answer-free hints of one turn, preferred first.

        Those that leak the answer, or that cannot be written, are counted.
        """
        answer = self.answer_of(trace)
        for source in self.config.sources:
            for hint in self._written(source, trace, turn, group, answer, counts):
                text, was_cut = shortened(hint.text, self.config.max_tokens, self.tokens)
                if not text.strip():
                    continue
                try:
                    refuse_leak(text, answer, f"the {source} hint of {trace.trace_id}")
                except HintLeak:
                    counts.refused += 1
                    continue
                counts.cut += was_cut
                yield Hint(turn, source, text, hint.wording, hint.site)

    def _written(
        self,
        source: HintSource,
        trace: Trace,
        turn: int,
        group: Sequence[Trace],
        answer: str | None,
        counts: HintCounts,
    ) -> list[Hint]:
        """Return a source's hints; where a text of others makes it fail, none for this turn."""
        try:
            return list(self._from(source, trace, turn, group, answer, counts))
        except (LookupError, TypeError, ValueError) as error:
            counts.fail(f"the {source} hint failed with {type(error).__name__}: {error}"[:500])
            return []

    def _from(
        self,
        source: HintSource,
        trace: Trace,
        turn: int,
        group: Sequence[Trace],
        answer: str | None,
        counts: HintCounts,
    ) -> Iterator[Hint]:
        if source == "error":
            for site in trace.error_sites:
                if site.turn == turn:
                    yield from self._worded(trace, site, counts)
        elif source == "feedback":
            yield from _feedback(trace, turn)
        elif turn == _sibling_turn(trace) and _is_shown_a_sibling(trace, group):
            try:
                yield from _sibling(trace, group, answer)
            except HintLeak:
                counts.refused += 1

    def _worded(self, trace: Trace, site: ErrorSite, counts: HintCounts) -> Iterator[Hint]:
        """Yield the writer's text, if there is one, and then the template."""
        written = self.written.get((trace.trace_id, site.turn))
        if written is not None:
            yield Hint(site.turn, "error", PREFIX + written.text, written.wording, site)
        wording: Wording = "template" if self.config.active_writer is None else "fallback"
        try:
            text = render_hint(site, templates=self.templates)
        except HintTemplateError as error:
            counts.fail(str(error))
            return
        yield Hint(site.turn, "error", text, wording, site)


def rounds(
    traces: Sequence[Trace], turns: Callable[[Trace], list[int]]
) -> Iterator[tuple[Trace, int]]:
    """Iterate over the turns of all traces round-robin: every first turn before any second one."""
    queues = [(trace, turns(trace)) for trace in traces]
    for place in range(max((len(queue) for _, queue in queues), default=0)):
        for trace, queue in queues:
            if place < len(queue):
                yield trace, queue[place]


def shortened(text: str, limit: int, tokens: Callable[[str], int]) -> tuple[str, bool]:
    """Truncate a text to `limit` tokens, at a word end if possible; also return whether it was."""
    if tokens(text) <= limit:
        return text, False
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    kept = _longest(text, ends, limit, tokens)
    return kept or _longest(text, list(range(1, len(text) + 1)), limit, tokens), True


def _longest(text: str, ends: list[int], limit: int, tokens: Callable[[str], int]) -> str:
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if tokens(text[: ends[middle - 1]]) <= limit else (low, middle - 1)
        )
    # Token counts need not grow with each character, so the result is verified.
    while low and tokens(text[: ends[low - 1]]) > limit:
        low -= 1
    return text[: ends[low - 1]] if low else ""


def _is_shown_a_sibling(trace: Trace, group: Sequence[Trace]) -> bool:
    return not trace.success and bool(trace.turns) and chosen_sibling(trace, group) is not None


def _sibling_turn(trace: Trace) -> int:
    """Return the first error's turn, or the last turn if a failed rollout has no error site."""
    return min((site.turn for site in trace.error_sites), default=len(trace.turns) - 1)


def _sibling(trace: Trace, group: Sequence[Trace], answer: str | None) -> Iterator[Hint]:
    sibling = chosen_sibling(trace, group)
    text = sibling_hint(sibling, answer) if sibling is not None else None
    if text is not None:
        yield Hint(_sibling_turn(trace), "sibling", text)


def _feedback(trace: Trace, turn: int) -> Iterator[Hint]:
    said = exchanges(trace)
    answer = said[turn][1] if turn < len(said) else None
    text = str(answer.get("content") or "") if answer is not None else ""
    if text and any(site.turn == turn for site in trace.error_sites):
        yield Hint(turn, "feedback", f"{PREFIX}{FEEDBACK} {text}")


def ordered_sites(
    traces: Sequence[Trace], turns: Callable[[Trace], list[int]], sites: Sites = "all"
) -> Iterator[tuple[Trace, int]]:
    """Iterate over the turns that may be hinted, in the order in which a step takes them.

    "all" is round-robin over the traces, "first" only each trace's earliest turn, and "surprise"
    begins with the highest mean surprisal of the sampled tokens, ties round-robin.
    """
    if sites == "first":
        return rounds(traces, lambda trace: sorted(turns(trace))[:1])
    every = rounds(traces, turns)
    if sites == "all":
        return every
    return iter(sorted(every, key=lambda site: -surprisal(*site)))


def surprisal(trace: Trace, turn: int) -> float:
    """Return the mean surprisal in nats of a turn's tokens when they were sampled; 0 for none."""
    logprobs = trace.turns[turn].logprobs
    return -sum(logprobs) / len(logprobs) if logprobs else 0.0


def right_sibling(
    failed: Trace, turn: int, group: Sequence[Trace], right: RightAction
) -> Trace | None:
    """Return a rollout of the same prompt that did the right thing where another one failed.

    It has read the same ids up to this turn, has no error there, and acted otherwise; with
    "success" it also succeeded. The highest reward wins, then the fewest turns, then the lowest
    sample number: the order of `group` does not matter.
    """
    own = failed.turns[turn].action_ids
    found = [
        one
        for one in group
        if one.trace_id != failed.trace_id
        and (one.group_id, one.role) == (failed.group_id, failed.role)
        and not one.screened
        and (one.success or right == "no_error")
        and turn < len(one.turns)
        and all(site.turn != turn for site in one.error_sites)
        and one.turns[turn].action_ids not in ([], own)
        and one.prompt_ids(turn) == failed.prompt_ids(turn)
    ]
    return min(found, key=lambda t: (-t.reward, len(t.turns), t.sample, t.trace_id), default=None)

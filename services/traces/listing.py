"""Selection, order and totals of listed rollouts.

They are pure functions over the rows of the store's index; `list_page` renders them.

All stored data of one rollout as plain values; `rollout_page` renders them.

Division of a rollout's messages: those before the first action, then turn by turn.

`whole_rollout` collects all data of one rollout from the run's store and config. Missing data is
replaced by a note and is not an error: the data file of a task may be gone, or a different version
may have written a row. Preferred SDPO hints of its turns follow the same rules as training batches.
No model is loaded: a text is tokenized only if its size in bytes exceeds the token limit. Whether a
hint fitted into the context of its step is not determined.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.configs.sdpo import HintsConfig
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.rollouts.hint_sources import Hint, HintCounts, HintSources, Place, WrittenHint
from composer_mesh.rollouts.hints import HintTemplates, hint_templates
from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.services.directory.claim import own_content
from composer_mesh.services.directory.report import HINT_TEMPLATES_FILE
from composer_mesh.services.steps.hint_writing import worded_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import damaged, object_row, stored_pair
from composer_mesh.services.store.rows import GroupRow, LateReward, TraceRow, Where
from composer_mesh.services.traces.options import Filters, SortKey


@dataclass(frozen=True, slots=True)
class Listed:
    """A rollout in a list. `step` is the one that trained it, from 1; `late` its last late reward.

    `late` is set whatever the state of the reward.
    """

    row: TraceRow
    step: int | None = None
    late: LateReward | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        row, late = self.row, self.late
        return {
            "trace_id": row.trace_id,
            "group_id": row.group_id,
            "sample": row.sample,
            "task": row.task,
            "split": row.split,
            "index": row.index,
            "state": str(row.state),
            "step": self.step,
            "reward": row.reward,
            "late_reward": late.reward if late else None,
            "success": row.success,
            "turns": row.turns,
            "tokens": row.tokens,
            "length": row.length,
            "error_kinds": list(row.error_kinds),
            "oldest_version": row.oldest_version,
            "newest_version": row.newest_version,
        }


Both = tuple[Listed, Trace]
"""The listed row of a rollout, and the rollout."""


@dataclass(frozen=True)
class RolloutTotals:
    """Totals of the matching rollouts; `errors` counts sites by kind, most frequent first."""

    count: int = 0
    mean_reward: float = 0.0
    success: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Listed]) -> "RolloutTotals":
        if not rows:
            return cls()
        errors = Counter(kind for one in rows for kind in one.row.error_kinds)
        return cls(
            len(rows),
            sum(one.row.reward for one in rows) / len(rows),
            sum(one.row.success for one in rows) / len(rows),
            dict(errors.most_common()),
        )


@dataclass(frozen=True)
class Listing:
    """The rollouts to show, and the totals of all matching ones."""

    shown: list[Listed]
    tally: RolloutTotals

    @property
    def hidden(self) -> int:
        """Number of matching rollouts that `--limit` omits."""
        return self.tally.count - len(self.shown)


def where(filters: Filters) -> Where:
    """Return the filters that the store's index supports; `fits` applies the others."""
    return Where(
        group_id=filters.group,
        step=None if filters.step is None else filters.step - 1,
        split=filters.split,
        min_reward=filters.min_reward,
        max_reward=filters.max_reward,
        success=False if filters.failed else None,
        error=filters.errors[0] if len(filters.errors) == 1 else None,
    )


def fits(row: TraceRow, filters: Filters) -> bool:
    """Return whether a rollout has one of the wanted errors, or none is wanted."""
    return not filters.errors or any(kind in filters.errors for kind in row.error_kinds)


def listed(
    rows: Iterable[TraceRow], groups: Iterable[GroupRow], rewards: Iterable[LateReward]
) -> list[Listed]:
    """Combine rows with the steps of their groups and with their late rewards."""
    steps = {group.group_id: group.trained for group in groups}
    late = {reward.trace_id: reward for reward in rewards}  # the last reward counts
    return [Listed(row, steps.get(row.group_id), late.get(row.trace_id)) for row in rows]


def listing(rows: Sequence[Listed], sort: SortKey, reverse: bool, limit: int) -> Listing:
    """Return the first `limit` rollouts in this order, 0 for all of them.

    Equal ones are in group order, also in a reversed list.
    """
    ordered = sorted(rows, key=lambda one: (one.row.group_id, one.row.sample))
    ordered.sort(key=KEYS[sort], reverse=reverse)
    return Listing(ordered[: limit or None], RolloutTotals.of(rows))


KEYS: dict[SortKey, Callable[[Listed], float]] = {
    "group": lambda one: one.row.group_id,
    "reward": lambda one: one.row.reward,
    "turns": lambda one: one.row.turns,
    "tokens": lambda one: one.row.tokens,
    "errors": lambda one: one.row.error_sites,
    "version": lambda one: -1 if one.row.newest_version is None else one.row.newest_version,
}


@dataclass(frozen=True, slots=True)
class Acted:
    """One action: its turn, its message, and the messages in response to it.

    `message` is None if the conversation has fewer assistant messages than the rollout has turns.
    """

    number: int
    turn: Turn
    message: Message | None
    answers: list[Message]


@dataclass(frozen=True, slots=True)
class ListedConversation:
    """The messages before the first action, and the actions in order."""

    opening: list[Message]
    turns: list[Acted]


def acted(trace: Trace) -> ListedConversation:
    """Divide a rollout's messages; a prompt may hold assistant messages that were not sampled."""
    messages = trace.messages
    places = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    own = places[max(0, len(places) - len(trace.turns)) :] if trace.turns else []
    ends = [*own[1:], len(messages)] if own else []
    spoken: Iterator[tuple[Message, list[Message]]] = (
        (messages[place], messages[place + 1 : end]) for place, end in zip(own, ends, strict=True)
    )
    found = []
    for number, turn in enumerate(trace.turns):
        message, answers = next(spoken, (None, []))
        found.append(Acted(number, turn, message, answers))
    return ListedConversation(messages[: own[0]] if own else list(messages), found)


@dataclass(frozen=True, slots=True)
class Paired:
    """A pair made from teachers' answers to a state of the rollout, with the outcome of the pair.

    `step` is the one that trained it, or in which it expired, counted from 1.
    """

    pair: PreferencePair
    state: str
    step: int | None


@dataclass(frozen=True)
class ListedRollout:
    """One rollout. `group` holds all rollouts of its prompt, including itself.

    `answer` is the verified answer, None if the task is not available. `hints` are those that the
    SDPO channel prefers, one per turn. `teacher_queries` holds the figures of the queries about the
    group's states, empty if there were none. `notes` state what is missing, and why.
    """

    listed: Listed
    trace: Trace
    group: Sequence[Trace]
    answer: str | None = None
    hints: Sequence[Hint] = ()
    pairs: Sequence[Paired] = ()
    rewards: Sequence[LateReward] = ()
    teacher_queries: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            **self.listed.as_dict(),
            "answer": self.answer,
            "messages": self.trace.messages,
            "turns": [asdict(turn) for turn in self.trace.turns],
            "error_sites": [asdict(site) for site in self.trace.error_sites],
            "hints": [
                {"turn": h.turn, "source": h.source, "wording": h.wording, "text": h.text}
                for h in self.hints
            ],
            "pairs": [
                {"state": one.state, "step": one.step, **asdict(one.pair)} for one in self.pairs
            ],
            "late_rewards": [
                {
                    "reward": one.reward,
                    "source": one.source,
                    "state": str(one.state),
                    "step": None if one.step is None else one.step + 1,
                }
                for one in self.rewards
            ],
            "asked": dict(self.teacher_queries),
            "group": [
                {"trace_id": t.trace_id, "reward": t.reward, "success": t.success}
                for t in self.group
            ],
            "notes": list(self.notes),
        }


TOKENIZER_FILE = "tokenizer.json"


class TokenCount:
    """Counts the tokens of a text. `find` returns a tokenizer's folder, when one is needed."""

    def __init__(self, limit: int, find: Callable[[], Path | None]) -> None:
        self._limit, self._find = limit, find
        self._tokenizer: Tokenizer | None = None
        self.guessed = False
        """Whether a text was counted without a tokenizer."""

    def __call__(self, text: str) -> int:
        """Return the number of tokens, or an upper bound if that is within the limit.

        Each token has at least one byte. Without a tokenizer every text is assumed to be short
        enough.
        """
        if (most := len(text.encode(errors="replace"))) <= self._limit:
            return most
        if self._tokenizer is None:
            folder = self._find()
            if folder is None:
                self.guessed = True
                return self._limit
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def hints_of(
    trace: Trace,
    group: Sequence[Trace],
    config: HintsConfig,
    answer: str | None,
    written: Mapping[Place, WrittenHint],
    tokens: Callable[[str], int],
    templates: HintTemplates | None,
) -> tuple[list[Hint], list[str]]:
    """Return the first hint of each turn that gets one, and notes about turns without one.

    `written` holds a hint writer's texts by trace and turn. `templates` are those of the run; with
    None, those of its task are unknown.
    """
    known = hint_templates(config.templates) if templates is None else templates
    sources = HintSources(config, lambda _: answer, tokens, known, written)
    found, notes = list[Hint](), list[str]()
    for turn in sources.turns(trace, group):
        counts = HintCounts()
        hint = next(sources.hints(trace, turn, group, counts), None)
        if hint is not None:
            found.append(hint)
        elif counts.faults:
            why = UNKNOWN_TEMPLATES if templates is None else next(iter(counts.faults))
            notes.append(f"turn {turn} has no hint: {why}")
        elif counts.refused:
            notes.append(f"turn {turn} has no hint: each one would have stated the answer")
    return found, notes


def tokenizer_folder(run: Path, policy: Path | None) -> Path | None:
    """Return the policy's tokenizer folder: its newest checkpoint, or the policy's folder."""
    steps = {path: path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")}
    numbered = [(int(number), path) for path, number in steps.items() if number.isdecimal()]
    folders = [path for _, path in sorted(numbered, reverse=True)]
    if policy is not None:
        folders.append(policy)
    return next((one for one in folders if (one / TOKENIZER_FILE).is_file()), None)


CONFIG_FILE = "config.toml"
MOST_TEMPLATES = 1 << 20
"""Size in bytes of the largest file of hint templates that is read."""
_TEMPLATES = fail_fast(dict[str, str])
UNKNOWN_TEMPLATES = f"the task's templates are unknown, since {HINT_TEMPLATES_FILE} cannot be read"
DROPPED = "dropped by a filter"


def whole_rollout(
    reader: RunReader, run: Path, one: Listed, config: Config | None
) -> ListedRollout:
    """Return the rollout of a row; raise DamagedRecord if its group cannot be read."""
    group = reader.traces(one.row.group_id)
    trace = next((trace for trace in group if trace.trace_id == one.row.trace_id), None)
    if trace is None:
        raise damaged("traces", one.row.trace_id, "the file of its group has no such rollout")
    notes: list[str] = []
    answer = trace.answer
    hints: Sequence[Hint] = ()
    if config is None:
        notes.append("config.toml cannot be read, so the hints are left out")
    elif config.sdpo.on:
        tokens = TokenCount(
            config.sdpo.hints.max_tokens, partial(own_tokenizer, run, config.policy.folder)
        )
        written = _written(reader, one.row.group_id)
        known = (written, tokens, stored_templates(run))
        hints, without = hints_of(trace, group, config.sdpo.hints, answer, *known)
        notes += without
        if tokens.guessed:
            notes.append(
                "no tokenizer of a run of this account was found, so a hint may be shown longer "
                "than it was used"
            )
    queries = _teacher_queries(reader, one.row.group_id)
    return ListedRollout(
        one,
        trace,
        group,
        answer,
        hints,
        [*_pairs(reader, trace), *_dropped(queries, trace)],
        [late for late in reader.rewards(None) if late.trace_id == trace.trace_id],
        figures if isinstance(figures := queries.get("figures"), dict) else {},
        notes,
    )


def stored_templates(run: Path) -> HintTemplates | None:
    """Return the hint templates that a run has stored; None without a file of valid templates."""
    try:
        found = parsed_json(read_regular(run / HINT_TEMPLATES_FILE, MOST_TEMPLATES))
        return HintTemplates(_TEMPLATES.validate_python(found))
    except (OSError, ValueError):
        return None


def own_tokenizer(run: Path, policy: Path | None) -> Path | None:
    """Return the folder of a tokenizer; None for a stranger's run, whose patterns may never end."""
    return tokenizer_folder(run, policy) if own_content(run / CONFIG_FILE) else None


def _written(reader: RunReader, group_id: int) -> dict[Place, WrittenHint]:
    """Return the hint writer's texts for a group."""
    body = reader.hint_writer_output(group_id)
    try:
        return {} if body is None else worded_from_json(body).written
    except ValueError as error:
        raise damaged("groups", group_id, short_reason(error)) from None


def _pairs(reader: RunReader, trace: Trace) -> list[Paired]:
    return [
        Paired(pair, str(row.state), None if row.step is None else row.step + 1)
        for row in reader.pairs_of(trace.group_id)
        if (pair := stored_pair(row)).trace_id == trace.trace_id
    ]


def _teacher_queries(reader: RunReader, group_id: int) -> dict[str, Any]:
    """Return the stored outcome of a group's teacher queries, empty if there were none."""
    body = reader.teacher_query_of(group_id) or b"{}"
    return object_row("asked", (group_id, body))


def _dropped(queries: dict[str, Any], trace: Trace) -> list[Paired]:
    """Return the pairs of a rollout that a filter dropped; only the query outcome has them."""
    candidates = queries.get("candidates")
    found = candidates if isinstance(candidates, list) else []
    try:
        pairs = [pair_from_json(json.dumps(one)) for one in found if isinstance(one, dict)]
    except ValueError as error:
        raise damaged("asked", trace.group_id, short_reason(error)) from None
    return [Paired(pair, DROPPED, None) for pair in pairs if pair.trace_id == trace.trace_id]

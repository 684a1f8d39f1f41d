"""Selection, order and totals of listed rollouts.

Pure functions over the rows of the store's index; `list_page` renders them.

All stored data of one rollout as plain values; `rollout_page` renders them.

Division of a rollout's messages: those before the first action, then turn by turn.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_mesh.rollouts.hint_sources import Hint
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Message, Trace, Turn
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

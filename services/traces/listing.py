"""Selection, order and totals of listed rollouts.

Pure functions over the rows of the store's index; `list_page` renders them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.traces import Trace
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
class Tally:
    """Totals of the matching rollouts; `errors` counts sites by kind, most frequent first."""

    count: int = 0
    mean_reward: float = 0.0
    success: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Listed]) -> "Tally":
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
    tally: Tally

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
    return Listing(ordered[: limit or None], Tally.of(rows))


KEYS: dict[SortKey, Callable[[Listed], float]] = {
    "group": lambda one: one.row.group_id,
    "reward": lambda one: one.row.reward,
    "turns": lambda one: one.row.turns,
    "tokens": lambda one: one.row.tokens,
    "errors": lambda one: one.row.error_sites,
    "version": lambda one: -1 if one.row.newest_version is None else one.row.newest_version,
}

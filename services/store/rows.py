"""Value types of a run's store: states, rows and damage."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from composer_mesh.rollouts.traces import Split


class GroupState(StrEnum):
    """Progress of a group of rollouts. A group without a row has not entered the window."""

    IN_FLIGHT = "in_flight"
    FINISHED = "finished"
    TRAINED = "trained"
    DAMAGED = "damaged"
    """It was trained, but its file was found damaged later, so its rollouts cannot be read."""


class ItemState(StrEnum):
    """State of a pair or of a late reward."""

    WAITING = "waiting"
    TRAINED = "trained"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    """The rollouts of the pair are sampled again, so it no longer counts."""


class StepState(StrEnum):
    """Progress of a step."""

    PLANNED = "planned"
    DONE = "done"
    SUPERSEDED = "superseded"
    """The run was reset to an earlier step."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of rollouts. `entered` is the version served at entry, `trained` the one it made.

    `finished_at` is in seconds since 1970; `traces` is their number; `bytes` and `crc` (CRC-32)
    describe the group's file, and are 0 for a group without rollouts, which has no file.
    """

    group_id: int
    state: GroupState
    entered: int
    finished_at: float | None
    trained: int | None
    traces: int
    bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A rollout in the index. `tokens` counts sampled tokens, `length` also those of the context.

    `state` is that of its group; versions are None if nothing was sampled. `error_kinds` has the
    kind of each error site, in order.
    """

    trace_id: str
    group_id: int
    sample: int
    task: str
    split: Split
    index: int
    reward: float
    success: bool
    turns: int
    tokens: int
    length: int
    error_kinds: tuple[str, ...]
    oldest_version: int | None
    newest_version: int | None
    state: GroupState

    @property
    def error_sites(self) -> int:
        return len(self.error_kinds)


@dataclass(frozen=True, slots=True)
class Where:
    """Filter of the rollout index; None does not filter.

    `step` is the step that trained the rollout, from 0; `error` is a kind of error site.
    """

    trace_id: str | None = None
    group_id: int | None = None
    step: int | None = None
    split: str | None = None
    state: GroupState | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    success: bool | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class IndexTotals:
    """Totals of the rollouts of the index that match a filter; `errors` are sites by kind."""

    count: int
    mean_reward: float
    success: float
    errors: dict[str, int]


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step, numbered from 0: its manifest, and its metrics once it was trained."""

    step: int
    manifest: bytes
    metrics: dict[str, Any] | None
    state: StepState


@dataclass(frozen=True, slots=True)
class TeacherQueryRow:
    """A group with teacher queries: the figures, and the ids of its pairs."""

    group_id: int
    body: bytes
    pairs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairRow:
    """A pair; `step` is the one that trained it, or in which it expired. `body` is its JSON."""

    pair_id: str
    group_id: int | None
    version: int
    state: ItemState
    step: int | None
    body: bytes


@dataclass(frozen=True, slots=True)
class LateReward:
    """A posted reward; `place` is its number in the store."""

    place: int
    trace_id: str
    reward: float
    source: str
    state: ItemState = ItemState.WAITING
    step: int | None = None


class StoreMissing(Exception):
    """A directory without a store; the message names it and says what to do instead."""


class DamagedRecord(Exception):
    """A file or a row with wrong contents: its location, the fault and the repair."""

    def __init__(self, where: str, why: str, repair: str) -> None:
        super().__init__(where, why, repair)
        self.where, self.why, self.repair = where, why, repair

    def __str__(self) -> str:
        return f"{self.where} is damaged ({self.why}): {self.repair}"

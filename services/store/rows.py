"""What the store of a run says about its contents: states, rows and damage, as plain values.

Nothing here reads or writes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from composer_mesh.rollouts.traces import Split


class GroupState(StrEnum):
    """How far a group of rollouts is. A group without a row has not entered the window."""

    IN_FLIGHT = "in_flight"
    FINISHED = "finished"
    TRAINED = "trained"
    DAMAGED = "damaged"
    """It was trained, and its file was found damaged later: its rollouts cannot be read again."""


class ItemState(StrEnum):
    """What became of a pair or of a late reward."""

    WAITING = "waiting"
    TRAINED = "trained"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    """The rollouts of a pair are sampled again, so it counts no more."""


class StepState(StrEnum):
    """How far a step is."""

    PLANNED = "planned"
    DONE = "done"
    SUPERSEDED = "superseded"
    """The run went back to a step before it."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of rollouts. `entered` is the policy version served then, `trained` the one it made.

    `finished_at` is in seconds since 1970; `traces` counts them; `bytes` and `crc` (CRC-32) are of
    the group's file, 0 where a group without rollouts has none.
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
    """A rollout in the index. `tokens` are the sampled ones, `length` counts those of context too.

    `state` is its group's; the versions are None where nothing was sampled. `error_kinds` has the
    kind of each error site, in their order.
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
    """Which rollouts of the index are wanted; None asks for nothing.

    `step` is the number of the step that trained them, from 0; `error` a kind of error site.
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
class StepRow:
    """A step, numbered from 0: what it is made of, and its metrics once it was trained.

    `manifest` is empty in runs that were migrated: their steps cannot be trained again.
    """

    step: int
    manifest: bytes
    metrics: dict[str, Any] | None
    state: StepState


@dataclass(frozen=True, slots=True)
class TeacherQueryRow:
    """A group whose states teachers were asked about: the figures, and the ids of its pairs."""

    group_id: int
    body: bytes
    pairs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairRow:
    """A pair: `step` is the one that took it, or in which it expired. `body` is its JSON."""

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
    """A directory without a store: which, and what to do instead."""


class DamagedRecord(Exception):
    """A file or a row is not what was written: where it is, what is wrong, and the repair."""

    def __init__(self, where: str, why: str, repair: str) -> None:
        super().__init__(where, why, repair)
        self.where, self.why, self.repair = where, why, repair

    def __str__(self) -> str:
        return f"{self.where} is damaged ({self.why}): {self.repair}"

"""The manifest of one optimizer step, from which the same batch can be rebuilt.

    manifest  =  ids of groups and pairs, late rewards, figures     small: stored for every step
    batch     =  manifest + stored traces + stored pairs + stored hints

A manifest is written before its step is trained, and holds every input of the step's metrics that
its batch does not. `step_builder` rebuilds the batch; the store writes the manifest.

Outcome of querying the teachers about a step's groups.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.configs.validation import fail_fast
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.rollouts.batches import Advantage
from composer_mesh.rollouts.consensus import MAJORITY, VoteOutcome
from composer_mesh.rollouts.curriculum import GroupResult
from composer_mesh.rollouts.pairs import PreferencePair


@dataclass
class ReplayOutcome:
    """Pairs and counts from querying teachers about some groups. Cached answers cost 0 dollars.

    `skipped` states were not worth a query, and `saved` of them would otherwise have fit into the
    group's share. `failures` counts failed teacher queries by kind, `failed_by` by cause and
    teacher ("401/NAME"), `answered_by` answers by teacher. `reasons` holds the first message of
    each cause and teacher, and is not stored.
    """

    pairs: list[PreferencePair] = field(default_factory=list)
    states: int = 0
    skipped: int = 0
    saved: int = 0
    answers: int = 0
    cached: int = 0
    usd: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    failed_by: Counter[str] = field(default_factory=Counter)
    answered_by: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def agreement(self) -> float | None:
        """Share of the states with a majority of teachers in which it did what the student did."""
        decided = sum(self.outcomes[outcome] for outcome in MAJORITY)
        return self.outcomes[VoteOutcome.STUDENT_AGREES] / decided if decided else None

    def __iadd__(self, other: "ReplayOutcome") -> "ReplayOutcome":
        for name in ("pairs", *COUNTS, *COUNTERS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons = {**other.reasons, **self.reasons}
        return self


class UnreadableManifest(Worded, ValueError):
    """Raised where a stored manifest cannot be read."""

    message = (
        "the manifest of step {0} cannot be read ({1}): take run.sqlite from a copy of the "
        "run, or start a new run from one of its checkpoints"
    )


@dataclass(frozen=True, slots=True)
class TakenFigures:
    """Inputs of a step's teacher metrics, except its pairs.

    `asked` is the number of groups, from the start of the run, that are accounted for up to this
    step.
    """

    replay_outcome: dict[str, Any]
    expired: int
    waiting: int
    usd_total: float
    saved_usd: float
    asked: int


@dataclass(frozen=True, slots=True)
class StepManifest:
    """Contents of one step, recorded before it is trained.

    `rewards` are late rewards by trace, which hold from this step on; `corrections` are the
    resulting changes of the advantages of earlier steps' rollouts. `patience` holds, for each
    reward whose rollout is unknown, the step at which it was first seen. `figures` are those of
    rollouts. `dropped` are the groups that the step took and does not train. `results` are what all
    groups that it took have measured, where a curriculum depends on it.
    """

    step: int
    groups: tuple[int, ...]
    pairs: tuple[str, ...] = ()
    taken: TakenFigures | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    corrections: tuple[tuple[str, Advantage], ...] = ()
    late: dict[str, int] = field(default_factory=dict)
    patience: dict[int, int] = field(default_factory=dict)
    figures: dict[str, int | float] = field(default_factory=dict)
    dropped: tuple[int, ...] = ()
    results: tuple[GroupResult, ...] = ()

    @property
    def taken_groups(self) -> tuple[int, ...]:
        """The groups that the step took, whether it trains them or not."""
        return (*self.groups, *self.dropped)


_RECIPE = fail_fast(StepManifest)
COUNTERS = ("outcomes", "failures", "failed_by", "answered_by", "dropped")
COUNTS = ("states", "skipped", "saved", "answers", "cached", "usd")


def manifest_to_json(manifest: StepManifest) -> bytes:
    """Serialize a manifest as JSON; numbers round-trip bit for bit."""
    return json.dumps(_RECIPE.dump_python(manifest, mode="json"), allow_nan=False).encode()


def manifest_from_json(step: int, body: bytes) -> StepManifest:
    """Read the manifest of a step; raises UnreadableManifest where the bytes are invalid."""
    try:
        manifest = _RECIPE.validate_python(json.loads(body))
    except ValueError as error:
        raise UnreadableManifest(step, short_reason(error)) from None
    if manifest.step != step:
        raise UnreadableManifest(step, f"it is that of step {manifest.step}")
    return manifest


def figures_of(replay_outcome: ReplayOutcome) -> dict[str, Any]:
    """Return the counts of a replay outcome as plain values, without the pairs."""
    counters = {name: dict(getattr(replay_outcome, name)) for name in COUNTERS}
    return {name: getattr(replay_outcome, name) for name in COUNTS} | counters


def replay_outcome_of(figures: Mapping[str, Any]) -> ReplayOutcome:
    """Rebuild a replay outcome from its counts, without pairs."""
    # A run of an older release has fewer counters.
    counters: dict[str, Any] = {name: Counter(figures.get(name, {})) for name in COUNTERS}
    return ReplayOutcome(**{name: figures[name] for name in COUNTS}, **counters)

"""What one optimizer step was made of, so that the same batch can be made again.

    recipe  =  ids of groups and pairs, late rewards, figures       small: it is kept for every step
    batch   =  recipe + stored traces + stored pairs + stored hints

A recipe is written before its step is trained, and holds all that the step's metrics tell and that
its batch does not. How a batch is made of it is `step_builder`; where it is written, the store's.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from composer_mesh.services.steps.replay_outcome import ReplayOutcome


class UnreadableManifest(ValueError):
    """A stored recipe that is none."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)

    def __str__(self) -> str:
        return (
            f"the recipe of step {self.args[0]} cannot be read ({self.args[1]}): take run.sqlite "
            "from a copy of the run, or begin a new run from one of its checkpoints"
        )


@dataclass(frozen=True, slots=True)
class TakenFigures:
    """What a step's metrics tell of the teachers, its pairs aside.

    `asked` groups, counted from the first one of the run, have been accounted for up to here.
    """

    replay_outcome: dict[str, Any]
    expired: int
    waiting: int
    usd_total: float
    saved_usd: float
    asked: int


@dataclass(frozen=True, slots=True)
class StepManifest:
    """One step, before it is trained.

    `rewards` came late and hold from this step on, by trace; `corrections` are the differences of
    advantages that they make to rollouts of earlier steps. `patience` holds the step at which each
    reward was seen that belongs to no known rollout. `figures` are those of the rollouts' retries.
    """

    step: int
    groups: tuple[int, ...]
    pairs: tuple[str, ...] = ()
    taken: TakenFigures | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    corrections: tuple[tuple[str, float], ...] = ()
    late: dict[str, int] = field(default_factory=dict)
    patience: dict[int, int] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)


_RECIPE = TypeAdapter(StepManifest)
COUNTERS = ("outcomes", "failures", "dropped")
COUNTS = ("states", "skipped", "saved", "answers", "cached", "usd")


def manifest_to_json(manifest: StepManifest) -> bytes:
    """A recipe as JSON; numbers come back bit for bit."""
    return json.dumps(_RECIPE.dump_python(manifest, mode="json"), allow_nan=False).encode()


def manifest_from_json(step: int, body: bytes) -> StepManifest:
    """The recipe of a step; raises UnreadableRecipe where the bytes are none."""
    try:
        manifest = _RECIPE.validate_python(json.loads(body))
    except (ValueError, ValidationError) as error:
        raise UnreadableManifest(step, str(error).partition("\n")[0]) from None
    if manifest.step != step:
        raise UnreadableManifest(step, f"it is that of step {manifest.step}")
    return manifest


def figures_of(replay_outcome: ReplayOutcome) -> dict[str, Any]:
    """What was counted while teachers were asked, without the pairs, as plain values."""
    counters = {name: dict(getattr(replay_outcome, name)) for name in COUNTERS}
    return {name: getattr(replay_outcome, name) for name in COUNTS} | counters


def replay_outcome_of(figures: Mapping[str, Any]) -> ReplayOutcome:
    """The same counts again, without pairs."""
    counters: dict[str, Any] = {name: Counter(figures[name]) for name in COUNTERS}
    return ReplayOutcome(**{name: figures[name] for name in COUNTS}, **counters)

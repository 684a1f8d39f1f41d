"""What asking about one group came to, as it is stored: for figures, novelty and duplicates.

A run that goes on reads these rows in the order of their groups, and so knows what it had asked
about and which pairs its filters have seen. Pairs that were kept have rows of their own, and are
named here; those that a filter dropped are here alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json, pair_to_json
from composer_mesh.services.steps.replay_outcome import ReplayOutcome
from composer_mesh.services.steps.step_manifest import figures_of, replay_outcome_of


@dataclass(frozen=True, slots=True)
class TeacherQueryRecord:
    """One group: the situations of its states, what was counted, and its candidates in order."""

    group_id: int
    situations: list[str]
    replay_outcome: ReplayOutcome
    candidates: list[PreferencePair]


def query_record_to_json(asked: TeacherQueryRecord, kept: Sequence[PreferencePair]) -> bytes:
    """A row's body; `kept` are the candidates that are stored as pairs beside it."""
    named = {pair.pair_id for pair in kept}
    candidates: list[Any] = [
        pair.pair_id if pair.pair_id in named else json.loads(pair_to_json(pair))
        for pair in asked.candidates
    ]
    body = {
        "situations": asked.situations,
        "figures": figures_of(asked.replay_outcome),
        "candidates": candidates,
    }
    return json.dumps(body, allow_nan=False).encode()


def query_record_from_json(
    group_id: int, body: bytes, pairs: Mapping[str, PreferencePair]
) -> TeacherQueryRecord:
    """What `query_record_to_json` wrote, with the stored pairs that it names."""
    found = json.loads(body)
    candidates = [
        pairs[one] if isinstance(one, str) else pair_from_json(json.dumps(one))
        for one in found["candidates"]
    ]
    return TeacherQueryRecord(
        group_id, found["situations"], replay_outcome_of(found["figures"]), candidates
    )

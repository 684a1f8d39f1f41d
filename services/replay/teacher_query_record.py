"""Stored record of the teacher queries about one group: counts, novelty and filter candidates.

On resume these rows are read in group order, which restores the states that were queried and the
pairs that the filters have seen. Pairs that passed have rows of their own and are referenced by id;
pairs that a filter dropped are stored only here.
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
    """One group: the situations of its states, the counts, and its candidate pairs in order."""

    group_id: int
    situations: list[str]
    replay_outcome: ReplayOutcome
    candidates: list[PreferencePair]


def query_record_to_json(asked: TeacherQueryRecord, kept: Sequence[PreferencePair]) -> bytes:
    """Serialize a record; `kept` are the candidates that have pair rows of their own."""
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
    """Read what `query_record_to_json` wrote, resolving the stored pairs that it references."""
    found = json.loads(body)
    candidates = [
        pairs[one] if isinstance(one, str) else pair_from_json(json.dumps(one))
        for one in found["candidates"]
    ]
    return TeacherQueryRecord(
        group_id, found["situations"], replay_outcome_of(found["figures"]), candidates
    )

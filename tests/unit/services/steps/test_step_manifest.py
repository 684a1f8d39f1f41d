"""A recipe and what it is made of come back bit for bit, and what is none is refused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as some

from composer_mesh.rollouts.hint_sources import WrittenHint
from composer_mesh.services.steps.hint_writing import WrittenHints, worded_from_json, worded_to_json
from composer_mesh.services.steps.step_manifest import (
    ReplayOutcome,
    StepManifest,
    TakenFigures,
    UnreadableManifest,
    figures_of,
    manifest_from_json,
    manifest_to_json,
    replay_outcome_of,
)

numbers = some.floats(allow_nan=False, allow_infinity=False)
counts = some.dictionaries(some.text(max_size=5), some.integers(1, 9), max_size=3)


@given(
    rewards=some.dictionaries(some.text(max_size=5), numbers, max_size=3),
    corrections=some.lists(some.tuples(some.text(max_size=5), numbers), max_size=3),
    usd=numbers,
    outcomes=counts,
    patience=some.dictionaries(some.integers(0, 99), some.integers(0, 99), max_size=3),
)
def test_a_recipe_comes_back_bit_for_bit(
    rewards: dict[str, float],
    corrections: list[tuple[str, float]],
    usd: float,
    outcomes: dict[str, int],
    patience: dict[int, int],
) -> None:
    replay_outcome = ReplayOutcome(states=3, usd=usd, outcomes=Counter(outcomes))
    taken = TakenFigures(figures_of(replay_outcome), 1, 2, usd / 3, usd / 7, 8)
    manifest = StepManifest(
        4, (8, 9), ("a", "b"), taken, rewards, tuple(corrections), {"rewards": 1}, patience
    )
    assert manifest_from_json(4, manifest_to_json(manifest)) == manifest
    assert replay_outcome_of(figures_of(replay_outcome)) == replay_outcome
    older = figures_of(replay_outcome)
    del older["failed_by"], older["answered_by"]
    assert replay_outcome_of(older) == replay_outcome


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"step": 4}', b'{"step": "x", "groups": []}'])
def test_what_is_no_recipe_is_refused_with_the_repair(body: bytes) -> None:
    with pytest.raises(UnreadableManifest, match=r"the manifest of step 4 .*: take run\.sqlite"):
        manifest_from_json(4, body)


def test_the_recipe_of_another_step_is_refused() -> None:
    with pytest.raises(UnreadableManifest, match="it is that of step 5"):
        manifest_from_json(4, manifest_to_json(StepManifest(5, ())))


@given(usd=numbers, text=some.text())
def test_a_writers_words_come_back_as_they_were(usd: float, text: str) -> None:
    worded = WrittenHints({("train-000001-000", 2): WrittenHint(text, "llm")}, 3, usd)
    assert worded_from_json(worded_to_json(worded)) == worded

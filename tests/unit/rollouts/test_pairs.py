"""Preference pairs on disk: what is written reads back, and a line that is none is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preferences import ADD, ANSWER, answer, answers, failure, student
from pydantic import ValidationError

from composer_mesh.rollouts.consensus import decide
from composer_mesh.rollouts.pairs import (
    pair_from_json,
    pair_to_json,
    teachers_margin,
)

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(words=WORDS, model=WORDS)
def test_a_pair_survives_json(words: str, model: str) -> None:
    replies = [answer("a", f"{words}!", model=model), answer("b", f"{words}!"), failure("c")]
    pair = decide(student(ANSWER), replies, 2).pair
    assert pair is not None
    line = pair_to_json(pair)
    assert b"\n" not in line
    assert pair_from_json(line) == pair


def test_a_line_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValidationError):
        pair_from_json('{"pair_id": "p"}')


def test_provenance_says_by_name_who_disagreed_with_what() -> None:
    pair = decide(student(ANSWER), answers(ADD, ADD, "Answer: 9"), 2).pair
    assert pair is not None
    voices = json.loads(pair_to_json(pair))["provenance"]["voices"]
    dissent = [(v["teacher"], v["action"]) for v in voices if not v["with_majority"]]
    assert dissent == [("c", "9")]


def test_the_margin_is_the_lead_over_the_runner_up_among_all_that_were_asked() -> None:
    other = "Answer: 9"
    for replies, margin in (
        (answers(ADD, ADD, ADD), 1.0),
        (answers(ADD, ADD, other), 1 / 3),
        ([*answers(ADD, ADD), failure("c")], 2 / 3),
        (answers(ADD, ADD, ADD, other, "Answer: 8"), 2 / 5),
        (answers(ADD, ADD, ADD, other, other), 1 / 5),
    ):
        pair = decide(student(ANSWER), replies, 2).pair
        assert pair is not None
        assert teachers_margin(pair) == pytest.approx(margin)

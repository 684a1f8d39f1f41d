"""Preference pairs on disk: what is written reads back, and a line that is none is refused.

Rows for other trainers: one schema for all, loadable, and no call's spelling changed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preferences import ADD, ANSWER, BROKEN, LOOK, answer, answers, failure, pair_of, student
from pydantic import ValidationError

from composer_mesh.rollouts.consensus import decide
from composer_mesh.rollouts.pairs import (
    PreferencePair,
    pair_from_json,
    pair_record,
    pair_to_json,
    spoken_message,
    teachers_margin,
)
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.tasks.tool import tools_of
from composer_mesh.tasks.toolbox import ToolboxSession

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


TOOLS = [spec.schema for spec in tools_of(ToolboxSession).values()][:2]


def long_conversation(pair: PreferencePair) -> PreferencePair:
    said = assistant_message(f"Let me look.\n{LOOK}", "call_0")
    read = {"role": "tool", "tool_call_id": "call_0", "content": "12"}
    return replace(pair, pair_id="long", messages=[*pair.messages, said, read])


def voted() -> PreferencePair:
    pair = decide(student(ANSWER), [answer("a", ADD), answer("b", ADD), failure("c")], 2).pair
    assert pair is not None
    return pair


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hello"},
        {"role": "tool", "content": "12", "tool_call_id": "call_0"},
        {"role": "assistant", "content": BROKEN},
        {"role": "assistant", "content": ""},
    ],
)
def test_a_message_of_text_stays_that_text(message: dict[str, Any]) -> None:
    assert spoken_message(message) == {"role": message["role"], "content": message["content"]}


@pytest.mark.parametrize("text", [ADD, LOOK, f"Let me look.\n{LOOK}", "Answer: 5", ""])
def test_a_call_is_written_as_the_student_wrote_it(text: str) -> None:
    assert spoken_message(assistant_message(text, "call_0"))["content"] == text


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ([{"type": "text", "text": "a"}, {"type": "image"}, {"text": "b"}], "ab")],
)
def test_content_of_parts_is_its_text(content: Any, text: str) -> None:
    assert spoken_message({"role": "user", "content": content})["content"] == text


def test_arguments_that_are_no_json_are_written_as_they_are() -> None:
    function = {"name": "f", "arguments": '{"x": '}
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    text = spoken_message(message)["content"]
    assert text == '<tool_call>\n{"name": "f", "arguments": {"x": }\n</tool_call>'


def test_a_row_is_trls_conversational_preference() -> None:
    row = pair_record(voted(), TOOLS)
    assert row["prompt"] == [{"role": "user", "content": "What is 2 plus 3?"}]
    assert row["chosen"] == [{"role": "assistant", "content": ADD}]
    assert row["rejected"] == [{"role": "assistant", "content": ANSWER}]
    assert json.loads(row["tools"]) == TOOLS
    assert (row["state_id"], row["n_teachers_agreeing"], row["policy_version"]) == ("g0-s0/1", 2, 6)
    assert (row["teachers"], row["votes"], row["asked"], row["usd"]) == (["a", "b"], 2, 3, 1.0)
    assert (row["chosen_text"], row["rejected_text"]) == (ADD, ANSWER)


def test_chat_messages_and_provenance_are_kept_beside_the_text() -> None:
    row = pair_record(voted())
    assert json.loads(row["chosen_message"])["tool_calls"][0]["function"]["name"] == "calculator"
    assert json.loads(row["rejected_message"]) == {"role": "assistant", "content": ANSWER}
    assert json.loads(row["state_messages"]) == [{"role": "user", "content": "What is 2 plus 3?"}]
    voices = json.loads(row["provenance"])["voices"]
    assert [(v["teacher"], v["kind"], v["failure"]) for v in voices] == [
        ("a", "call", None),
        ("b", "call", None),
        ("c", "failed", "rate"),
    ]


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: types(inner) for key, inner in value.items()}
    return [types(value[0])] if isinstance(value, list) else type(value)


def test_all_rows_have_the_same_keys_and_types() -> None:
    pairs = [voted(), long_conversation(voted()), pair_of("old"), replace(voted(), usd=0)]
    rows = [pair_record(pair, TOOLS) for pair in pairs]
    assert all(types(row) == types(rows[0]) for row in rows)
    for row in rows:
        assert all(types(m) == {"role": str, "content": str} for m in row["prompt"])
    without = list(pair_record(pairs[0]))
    assert without == [key for key in rows[0] if key != "tools"]


def test_datasets_loads_rows_whose_calls_come_late(tmp_path: Path) -> None:
    """It infers the schema from the first part of a file, here one without a call."""
    datasets = pytest.importorskip("datasets")
    plain = [pair_of(str(n), "Answer: 4", "Answer: 5", "x" * 500) for n in range(40)]
    pairs = [*plain, long_conversation(voted()), voted()]
    rows = [pair_record(pair, TOOLS) for pair in pairs]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loaded = datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(tmp_path), chunksize=4096
    )
    assert loaded.num_rows == len(rows)
    assert list(loaded) == rows

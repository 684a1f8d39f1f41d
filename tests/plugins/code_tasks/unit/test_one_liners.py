"""The task one_liners: its family of expressions, and what its expert writes."""

from __future__ import annotations

import random

import pytest

from composer_mesh.plugins.code_tasks.one_liners import PROMPT, Expression, OneLiners, expression_of
from composer_mesh.rollouts.tool_calls import ToolCall, parse_action
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.task import TaskSettings, split_of

SAID = {
    "a plus 3": "a + 3",
    "b minus a, then times c": "(b - a) * c",
    "b minus a, then plus c": "b - a + c",
    "a plus c, then modulo 7": "(a + c) % 7",
    "the larger of a and 7, then times c": "max(a, 7) * c",
    "the smaller of c and b": "min(c, b)",
}


@pytest.mark.parametrize("words", SAID)
def test_words_ask_for_one_line_and_are_said_of_it(words: str) -> None:
    assert expression_of(words).python() == SAID[words]
    assert expression_of(words).words == words


def test_words_of_no_expression_are_refused() -> None:
    for words in ("a plus", "a over b", "__import__('os')", "a plus b, then times d"):
        with pytest.raises(ValueError, match="asks for no expression"):
            expression_of(words)


def test_values_are_those_of_python() -> None:
    assert expression_of("b minus a, then modulo 7").value({"a": 9, "b": 2, "c": 0}) == -7 % 7
    assert (
        expression_of("the smaller of a and 4, then times c").value({"a": 5, "b": 0, "c": 3}) == 12
    )


def test_a_row_has_visible_tests_and_other_hidden_values_of_its_words() -> None:
    task = OneLiners.create()
    judged = task.judged({"words": "a plus 3"})
    assert b"raise NotImplementedError" in judged.files["f.py"]
    assert len(judged.fail_to_pass) == 3
    assert len(judged.cases) == 12
    for case in judged.cases:
        assert case.expected == {"returned": case.arguments[0] + 3}
        assert repr(case.arguments).encode() not in judged.files["test_f.py"]
    assert task.judged({"words": "a plus 3"}) == judged


def test_no_expression_is_trained_and_held_out() -> None:
    task = OneLiners.create()
    words = {
        split: {task.episode(split, index).payload["words"] for index in range(200)}
        for split in ("train", "heldout")
    }
    assert not words["train"] & words["heldout"]
    assert {split_of(one) for one in words["heldout"]} == {"heldout"}


def test_a_wrong_action_of_the_expert_is_wrong() -> None:
    task, rng = OneLiners.create(), random.Random(0)
    for index in range(300):
        words = task.episode("train", index).payload["words"]
        messages = [{"role": "user", "content": f"{PROMPT}{words}."}]
        call = parse_action(task.corrupted(messages, rng))
        assert isinstance(call, ToolCall)
        assert call != parse_action(task.expert(messages))


def test_a_file_of_rows_is_refused(tmp_path: object) -> None:
    with pytest.raises(UnusableTask, match="makes its own"):
        OneLiners.create(TaskSettings(path=tmp_path))  # type: ignore[arg-type]


def test_one_who_forgets_parentheses_writes_another_expression() -> None:
    made = Expression("plus", "a", "b", "times", "c")
    assert made.python(parentheses=False) == "a + b * c"

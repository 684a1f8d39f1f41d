"""Mistakes: each is a wrong version of its right action, of the kind that it stands for."""

import random
from collections import Counter
from typing import Any

import pytest

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tool_calls import ToolCall, call_text
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.mistakes import (
    GIVE_UP,
    HABIT_SHARE,
    as_number,
    calls_and_results,
    corrupt,
    recover_or_give_up,
)
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

QUESTION: list[Message] = [{"role": "user", "content": "What is it?"}]


def session() -> SyncSession:
    row = {"question": QUESTION[0]["content"], "table": {"lamp": 12}, "answer": 777}
    return SyncSession(ToolboxTask.create(), Episode("toolbox", "train", 0, row))


def kind_of(text: str) -> str:
    error = session().step(text).error
    return error.error_kind if error else "none"


def drawn(right: str, messages: list[Message], draws: int = 400) -> Counter[str]:
    rng = random.Random(1)
    return Counter(corrupt(right, messages, rng) for _ in range(draws))


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("lookup", {"key": "lamp"}, "missing_key"),
    ("calculator", {"op": "add", "a": 2, "b": 3}, "wrong_type"),
    ("calculator", {"op": "divide", "a": 0, "b": 3}, "division_by_zero"),
    ("convert", {"value": 3, "source": "m", "target": "cm"}, "unknown_tool"),
]


@pytest.mark.parametrize(("name", "arguments", "habit"), CALLS)
def test_each_tool_has_a_habitual_mistake_and_others(
    name: str, arguments: dict[str, Any], habit: str
) -> None:
    right = call_text(name, arguments)
    texts = drawn(right, QUESTION)
    assert right not in texts
    kinds = Counter(dict.fromkeys(("unknown_tool", "malformed_call", "wrong_answer"), 0))
    for text, count in texts.items():
        kinds[kind_of(text)] += count
    assert min(kinds.values()) > 0
    assert kinds[habit] / kinds.total() == pytest.approx(HABIT_SHARE, abs=0.15)
    assert kinds["none"] == 0


def test_a_division_of_equal_numbers_is_never_corrupted_into_itself() -> None:
    right = call_text("calculator", {"op": "divide", "a": 6, "b": 6})
    assert right not in drawn(right, QUESTION)


def test_an_early_answer_is_a_number_at_hand_but_never_zero() -> None:
    right = call_text("calculator", {"op": "divide", "a": 0, "b": 3})
    answers = {text for text in drawn(right, QUESTION) if text.startswith("Answer")}
    assert answers == {"Answer: 3"}


def test_a_wrong_answer_is_an_earlier_number_or_none() -> None:
    running = session()
    running.step(call_text("calculator", {"op": "add", "a": 2.5, "b": 3}))
    assert set(drawn("Answer: 5.5", running.messages)) == {GIVE_UP, "Answer: 2.5"}
    assert set(drawn("Answer: 2.5", running.messages)) == {GIVE_UP}
    assert set(drawn("Answer: 5.5", QUESTION)) == {GIVE_UP}


def test_a_wrong_answer_survives_any_number_that_a_model_wrote() -> None:
    running = session()
    running.step(call_text("calculator", {"op": "add", "a": True, "b": 1e308}))
    assert set(drawn("Answer: 5", running.messages)) == {GIVE_UP, f"Answer: {int(1e308)}"}


def test_the_same_draw_gives_the_same_mistake() -> None:
    right = call_text("lookup", {"key": "lamp"})
    for seed in range(20):
        one = corrupt(right, QUESTION, random.Random(seed))
        assert one == corrupt(right, QUESTION, random.Random(seed))


def test_recovery_has_its_probability() -> None:
    rng = random.Random(0)
    texts = [recover_or_give_up("right", rng, 0.3) for _ in range(2000)]
    assert set(texts) == {"right", GIVE_UP}
    assert texts.count("right") / 2000 == pytest.approx(0.3, abs=0.04)
    assert recover_or_give_up("right", rng, 0.0) == GIVE_UP
    assert recover_or_give_up("right", rng, 1.0) == "right"


def test_only_calls_that_a_tool_answered_are_read_back() -> None:
    running = session()
    running.step("<tool_call>\n{broken\n</tool_call>")
    running.step(call_text("lookup", {"key": "kite"}))
    running.step(call_text("lookup", {"key": "lamp"}))
    assert list(calls_and_results(running.messages)) == [
        (ToolCall("lookup", {"key": "kite"}), "error: no key kite"),
        (ToolCall("lookup", {"key": "lamp"}), "12"),
    ]


@pytest.mark.parametrize(
    ("content", "number"),
    [("12", 12), ("12.0", 12), ("0.5", 0.5), ("-3", -3), ("error: no key", None), ("", None)],
)
def test_a_tool_result_is_a_number_or_an_error(content: str, number: float | None) -> None:
    assert as_number(content) == number
    assert not isinstance(as_number(content), float) or content == "0.5"

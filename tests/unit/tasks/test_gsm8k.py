"""Math word problems: rows into episodes, annotations into calls, bad rows into errors.

The arithmetic of GSM8K's annotations: as binary calls in their order, or refused.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT

from composer_mesh.configs.schema import DataConfig
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks import numbers
from composer_mesh.tasks.errors import DataError
from composer_mesh.tasks.gsm8k import (
    Gsm8kTask,
    NotArithmetic,
    append_steps,
    is_right,
    normalized,
    read_problems,
)
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.numbers import Number, format_number
from composer_mesh.tasks.planned import PlannedCall
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings

REAL = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"


SPLITS: tuple[Split, Split] = ("train", "heldout")


PROBLEMS = [
    ("A crate holds 48 pears. Half are eaten. How many are left?", "48/2=<<48/2=24>>24\n#### 24"),
    (
        "Mia packs 3 boxes of 12 cups and 4 loose ones. How many cups?",
        "She packs 3*12+4=<<3*12+4=40>>40 cups.\n#### 40",
    ),
    (
        "A farm sells 1,200 eggs at $0.25 and spends $450. What is left?",
        "It earns 1200*.25=<<1200*.25=300>>300.\nIt loses <<300-450=-150>>150.\n#### -150",
    ),
    (
        "Two teams of (3+4) players each pay $10. What do they pay?",
        "They pay 2*(3+4)*10=$<<2*(3+4)*10=140>>140\n#### $140",
    ),
    ("A yacht costs a million and a half. What is its price?", "No sums here.\n#### 1,500,000"),
    ("A quarter of 10 litres is drunk. How much?", "<<25%*10=2.5>>2.5 litres\n#### 2.5"),
    ("A riddle with x apples: how many?", "x is <<x+1=4>>4, so 3.\n#### 3"),
    ("Nothing is shared by none. How much is it?", "<<5/0=0>>0\n#### 0"),
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes lines, texts as they are and anything else as JSON, into one file."""

    def write(*lines: object) -> Path:
        path = tmp_path / "problems.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return path

    return write


def gsm8k(path: Path, every: int, max_turns: int = 10, penalty: float = 0.0) -> Gsm8kTask:
    settings = TaskSettings(
        max_turns=max_turns, tool_error_penalty=penalty, path=path, heldout_every=every
    )
    return Gsm8kTask.create(settings)


def row(question: str, answer: str = "<<1+1=2>>2\n#### 2") -> dict[str, str]:
    return {"question": question, "answer": answer}


@pytest.fixture
def task(write: Callable[..., Path]) -> Gsm8kTask:
    return gsm8k(write(*[row(*problem) for problem in PROBLEMS]), 4, penalty=0.1)


def every_episode(task: Gsm8kTask) -> list[tuple[Split, int]]:
    return [(split, index) for split in SPLITS for index in range(len(task.rows(split)))]


def play(task: Gsm8kTask, split: Split, index: int) -> tuple[list[str], bool]:
    """The actions of the expert's own episode, and whether it succeeded."""
    session, actions = SyncSession(task, task.episode(split, index)), []
    while True:
        actions.append(task.expert(session.messages))
        result = session.step(actions[-1])
        assert result.error is None
        if result.done:
            return actions, session.outcome().success


def calculate(op: str, a: Number, b: Number) -> str:
    return call_text("calculator", {"op": op, "a": a, "b": b})


def test_the_expert_solves_every_problem_also_those_it_can_not_chain(task: Gsm8kTask) -> None:
    played = [play(task, split, index) for split, index in every_episode(task)]
    assert [success for _, success in played] == [True] * len(PROBLEMS)
    answers = {actions[-1] for actions, _ in played}
    assert {"Answer: 24", "Answer: -150", "Answer: 1500000", "Answer: 2.5"} <= answers


@pytest.mark.parametrize(
    ("problem", "actions"),
    [
        (0, [calculate("divide", 48, 2)]),
        (1, [calculate("multiply", 3, 12), calculate("add", 36, 4)]),
        (2, [calculate("multiply", 1200, 0.25), calculate("subtract", 300, 450)]),
        (
            3,
            [calculate("add", 3, 4), calculate("multiply", 2, 7), calculate("multiply", 14, 10)],
        ),
        (4, []),
        (5, [calculate("multiply", 0.25, 10)]),
        (6, []),
        (7, []),
    ],
)
def test_annotations_become_binary_calls_in_their_order(
    task: Gsm8kTask, problem: int, actions: list[str]
) -> None:
    question = PROBLEMS[problem][0]
    place = next(
        place
        for place in every_episode(task)
        if task.episode(*place).payload["question"] == question
    )
    played, _ = play(task, *place)
    assert played[:-1] == actions


def test_every_nth_row_is_held_out_and_no_question_is_in_both_splits(
    write: Callable[..., Path],
) -> None:
    rows = [row(f"Question  number {number % 17}?") for number in range(60)]
    rows += [row(f" Question number\t{number} ? ".replace(" ?", "?")) for number in range(20)]
    task = gsm8k(write(*rows), 3)
    train, heldout = (
        [normalized(task.episode(s, i).payload["question"]) for i in range(len(task.rows(s)))]
        for s in SPLITS
    )
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == len({*train, *heldout}) == 20
    assert heldout == [f"Question number {number}?" for number in range(2, 20, 3)]


def test_more_episodes_than_rows_begin_again_at_the_first_row(task: Gsm8kTask) -> None:
    for split in SPLITS:
        rows = len(task.rows(split))
        for index in range(rows):
            first, again = task.episode(split, index), task.episode(split, index + 5 * rows)
            assert again.index == index + 5 * rows
            assert first.payload == again.payload
            assert (first.task, first.split) == ("gsm8k", split)
    assert (len(task.rows("train")), len(task.rows("heldout"))) == (6, 2)


def test_the_expert_reads_nothing_but_the_messages(
    task: Gsm8kTask, write: Callable[..., Path]
) -> None:
    stranger = gsm8k(write(*[row(*problem) for problem in reversed(PROBLEMS)]), 2)
    for place in every_episode(task):
        session = SyncSession(task, task.episode(*place))
        session.step(call_text("abacus", {}))
        session.step(task.expert(session.messages))
        for turn in (0, 1):
            state = json.loads(json.dumps(session.state(turn)))
            assert stranger.expert(state) == task.expert(session.state(turn))


def test_a_question_of_another_file_is_refused(task: Gsm8kTask) -> None:
    with pytest.raises(ValueError, match="not a question of this file"):
        task.expert([{"role": "user", "content": "What is 3 plus 4?"}])


def test_the_expert_goes_on_after_mistakes_and_answers_in_the_last_turn(
    write: Callable[..., Path],
) -> None:
    long = row("How far is it?", "<<1+2+3+4+5=15>>15\n#### 15")
    task = gsm8k(write(long, row("And how long?")), 2, max_turns=4)
    session = SyncSession(task, task.episode("train", 0))
    session.step(calculate("add", 1, 3))
    assert task.expert(session.messages) == calculate("add", 1, 2)
    session.step(task.expert(session.messages))
    assert task.expert(session.messages) == calculate("add", 3, 3)
    session.step(task.expert(session.messages))
    assert task.expert(session.messages) == "Answer: 15"
    session.step("Answer: 15")
    assert session.outcome().success


def test_a_corrupted_action_differs_from_the_right_one_and_never_succeeds(
    task: Gsm8kTask,
) -> None:
    for split, index in every_episode(task):
        actions, _ = play(task, split, index)
        for turn in range(len(actions)):
            for seed in range(40):
                session = SyncSession(task, task.episode(split, index))
                for action in actions[:turn]:
                    session.step(action)
                wrong = task.corrupted(session.messages, random.Random(seed))
                assert wrong != actions[turn]
                session.step(wrong)
                assert not session.outcome().success


def test_a_guess_that_happens_to_be_right_does_not_count_as_corrupted(
    write: Callable[..., Path],
) -> None:
    task = gsm8k(write(row("One of 16?", "<<16*1=16>>16\n#### 16"), row("Two?")), 2)
    messages: list[Message] = [{"role": "user", "content": "One of 16?"}]
    drawn = {task.corrupted(messages, random.Random(seed)) for seed in range(100)}
    assert "Answer: 16" not in drawn
    assert len(drawn) >= 4


@pytest.mark.parametrize(
    ("value", "answer", "right"),
    [
        (24, 24, True),
        (24.00001, 24, True),
        (24.0001, 24, False),
        (1_500_000.5, 1_500_000, True),
        (1_500_002, 1_500_000, False),
        (0.0000001, 0, True),
        (-150, 150, False),
    ],
)
def test_answers_are_compared_by_a_relative_tolerance(
    value: float, answer: Number, right: bool
) -> None:
    assert is_right(value, answer) is right


@pytest.mark.parametrize(
    ("text", "success"),
    [("Answer: 1,500,000", True), ("Answer: 1500000.0", True), ("Answer: 15", False)],
)
def test_an_answer_may_be_written_with_commas(
    write: Callable[..., Path], text: str, success: bool
) -> None:
    task = gsm8k(write(row("Price?", "#### 1,500,000"), row("Other?")), 2)
    session = SyncSession(task, task.episode("train", 0))
    session.step(text)
    assert session.outcome().success is success


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{no json", ["line 2", "'{no json'", "write one JSON object"]),
        ("[1, 2]", ["line 2", "'[1, 2]'", "write one JSON object"]),
        ({"question": "How many?"}, ["line 2", "answer: Field required"]),
        ({"question": 3, "answer": "#### 3"}, ["line 2", "question: Input should be a valid"]),
        ({"question": "  ", "answer": "#### 3"}, ["line 2", "question is '  '", "ask something"]),
        (row("How many?", "It is 3."), ["line 2", "'It is 3.'", "for example #### 72"]),
        (row("How many?", "#### three"), ["line 2", "'#### three'", "for example #### 72"]),
        (row("How many?", "#### 3\n#### "), ["line 2", "for example #### 72"]),
        (row("How many?", "#### " + "9" * 400), ["line 2", "numbers go up to", "remove"]),
        (row("First?", "#### 5"), ["line 2", "line 1", "remove one of them"]),
        ('{"question": "\\ud800?", "answer": "#### 3"}', ["line 2", "write one JSON object"]),
    ],
)
def test_a_bad_row_is_named_with_its_value_and_the_repair(
    write: Callable[..., Path], line: object, words: list[str]
) -> None:
    path = write(row("First?"), line, row("Third?"))
    with pytest.raises(DataError) as caught:
        gsm8k(path, 2)
    for word in [str(path), *words]:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_an_unusable_file_is_named_with_the_repair(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="readable UTF-8 JSONL file"):
        gsm8k(tmp_path / "missing.jsonl", 2)
    with pytest.raises(DataError, match="readable UTF-8 JSONL file"):
        gsm8k(tmp_path, 2)
    with pytest.raises(DataError, match=r"0 different questions.*lower data\.heldout_every"):
        gsm8k(write(""), 2)
    with pytest.raises(DataError, match=r"1 different questions.*lower data\.heldout_every"):
        gsm8k(write(row("One?"), "", row("One?")), 2)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe4"}')
    with pytest.raises(DataError, match="readable UTF-8 JSONL file"):
        gsm8k(tmp_path / "latin.jsonl", 2)


def test_a_data_error_survives_the_way_between_processes() -> None:
    error = DataError("line 3 is bad: repair it")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_file_is_read_once_until_it_changes(write: Callable[..., Path]) -> None:
    path = write(row("One?"), row("Two?"))
    rows = read_problems(path)
    assert read_problems(path) is rows
    write(row("One?"), row("Too?"))
    os.utime(path, ns=(1, 1))
    assert read_problems(path)[1].question == "Too?"


def test_a_config_makes_the_task(write: Callable[..., Path], build_config: Any) -> None:
    path = write(*[row(*problem) for problem in PROBLEMS])
    data = DataConfig(task="gsm8k", path=path, heldout_every=4)
    task = make_task(build_config(data=data.model_dump(), environment={"max_turns": 1}))
    assert task.name == "gsm8k"
    assert [tool["function"]["name"] for tool in task.tools] == ["calculator"]
    assert task.expert(SyncSession(task, task.episode("train", 0)).messages) == "Answer: 24"
    same = gsm8k(path, 4)
    assert same.episode("heldout", 1) == task.episode("heldout", 1)


@pytest.mark.skipif(not REAL.is_file(), reason=f"the GSM8K file {REAL} is not there")
def test_the_expert_solves_all_of_the_real_problems() -> None:
    task = gsm8k(REAL, 5)
    played = [play(task, split, index) for split, index in every_episode(task)]
    solved = sum(success for _, success in played) / len(played)
    chained = sum(isinstance(parse_action(a[0]), ToolCall) for a, _ in played) / len(played)
    print(f"{len(played)} problems: {solved:.1%} solved, {chained:.1%} with calculator calls")
    assert solved == 1.0
    assert chained >= 0.95
    assert len(task.rows("heldout")) == len(played) // 5
    answer = task.episode("train", 0).payload["answer"]
    assert format_number(answer) == play(task, "train", 0)[0][-1].removeprefix("Answer: ")


def chain(text: str) -> tuple[list[PlannedCall], float]:
    """The steps of an expression and the number that its last call gives."""
    steps: list[PlannedCall] = []
    append_steps(text, steps)
    results: list[numbers.Number] = []
    for step in steps:
        results.append(numbers.calculate(**step.call(results).arguments))
    return steps, float(results[-1])


@pytest.mark.parametrize(
    ("text", "calls", "value"),
    [
        ("2+3*4", 2, 14),
        ("(2+3)*4", 2, 20),
        ("20-5-3", 2, 12),
        ("64/4/2", 2, 8),
        ("64/(4/2)", 2, 32),
        ("-3+5", 1, 2),
        ("+3 - -5", 1, 8),
        ("10-(-(2*3))", 3, 16),
        ("1,200 * 2", 1, 2400),
        (".5*8", 1, 4),
        ("5.*2", 1, 10),
        ("15%*200", 1, 30),
        ("((2))*((3))", 1, 6),
    ],
)
def test_precedence_and_signs_are_those_of_arithmetic(text: str, calls: int, value: float) -> None:
    steps, result = chain(text)
    assert len(steps) == calls
    assert result == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    ["", " ", "3+", "*3", "(3", "3)", "3 4", "x+1", "2**3", "8//2", "3=3", "()", "1/2/", "5 %%",
     "__import__('os')", "(" * 150, "1+" * 150 + "1", "٣+1"],
)  # fmt: skip
def test_what_is_not_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(NotArithmetic):
        append_steps(text, [])


def _expressions() -> st.SearchStrategy[tuple[str, float]]:
    """Texts with their values, built together: no second parser decides what is right."""
    numbers = st.integers(0, 99).map(lambda n: (str(n), float(n)))

    def combine(inner: st.SearchStrategy[tuple[str, float]]) -> st.SearchStrategy[Any]:
        pairs = st.tuples(inner, st.sampled_from("+-*"), inner)
        return pairs.map(lambda p: (f"({p[0][0]}){p[1]}({p[2][0]})", _value(p[0][1], *p[1:])))

    return st.recursive(numbers, combine, max_leaves=6)


def _value(a: float, sign: str, b: tuple[str, float]) -> float:
    return {"+": a + b[1], "-": a - b[1], "*": a * b[1]}[sign]


@given(_expressions())
def test_a_chain_of_calls_computes_what_the_text_says(expression: tuple[str, float]) -> None:
    text, value = expression
    if any(sign in text for sign in "+-*"):
        assert chain(text)[1] == pytest.approx(value)


@given(st.text(alphabet="0123456789.,+-*/()% ", max_size=40))
def test_any_annotation_is_either_steps_or_not_arithmetic(text: str) -> None:
    steps: list[PlannedCall] = []
    try:
        append_steps(text, steps)
    except NotArithmetic:
        return
    assert all(step.tool == "calculator" for step in steps)

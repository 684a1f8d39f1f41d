"""Every way in which a call can be wrong, as the agent, the error site and the hint tell it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.consensus import read_answer
from composer_mesh.rollouts.hints import TEMPLATES, HintLeak, render_hint
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.tool_calls import (
    CLOSE,
    OPEN,
    MalformedCall,
    ToolCall,
    call_text,
    parse_action,
)
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.tasks.numbers import LARGEST, format_number
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.tool import tools_of
from composer_mesh.tasks.toolbox import ToolboxSession, ToolboxTask

ANSWER = 57.25
ROW = {
    "question": "What is 229 divided by 4?",
    "table": {"lamp": 12, "rope": 8},
    "answer": ANSWER,
}


def session(max_turns: int = 4, penalty: float = 0.0) -> SyncSession:
    task = ToolboxTask.create(TaskSettings(max_turns=max_turns, tool_error_penalty=penalty))
    return SyncSession(task, Episode("toolbox", "train", 0, ROW))


def calculate(arguments: str) -> str:
    """A calculator call whose arguments are written as they stand."""
    return f'{OPEN}\n{{"name": "calculator", "arguments": {arguments}}}\n{CLOSE}'


def nested(depth: int) -> str:
    return calculate('{"op": "add", "a": 1, "b": ' + "[" * depth + "]" * depth + "}")


FAILURES = [
    (call_text("abacus", {"a": 1}), "unknown_tool"),
    (call_text("", {}), "unknown_tool"),
    (f"{OPEN}\n{{no json\n{CLOSE}", "malformed_call"),
    (f"{OPEN}\n[1]\n{CLOSE}", "malformed_call"),
    (f'{OPEN}\n{{"name": "calculator"}}\n{CLOSE}', "malformed_call"),
    (f'{OPEN}\n{{"name": 3, "arguments": {{}}}}\n{CLOSE}', "malformed_call"),
    (calculate("[]"), "malformed_call"),
    (calculate('{"op": "add", "a": 1, "b": 2}') * 2, "malformed_call"),
    (calculate('{"op": "add", "a": 1, "b": 2}').removesuffix(CLOSE), "malformed_call"),
    (f"Answer: 57.25 {CLOSE}", "malformed_call"),
    (f'{OPEN}{{"name": "\\ud800", "arguments": {{}}}}{CLOSE}', "malformed_call"),
    (calculate('{"op": "add", "a": 1, "b": ' + "9" * 5000 + "}"), "malformed_call"),
    (nested(100_000), "malformed_call"),
    (nested(500), "bad_value"),
    (nested(150), "wrong_type"),
    (calculate('{"op": "add", "a": "1", "b": 2}'), "wrong_type"),
    (calculate('{"op": "add", "a": true, "b": 2}'), "wrong_type"),
    (calculate('{"op": "add", "a": null, "b": 2}'), "wrong_type"),
    (call_text("lookup", {"key": 3}), "wrong_type"),
    (calculate('{"op": "add", "a": 1}'), "missing_argument"),
    (call_text("lookup", {}), "missing_argument"),
    (calculate('{"op": "add", "a": 1, "b": 2, "c": 3}'), "unknown_argument"),
    (calculate('{"op": "power", "a": 1, "b": 2}'), "bad_value"),
    (calculate('{"op": ["add"], "a": 1, "b": 2}'), "bad_value"),
    (calculate('{"op": "add", "a": 1e999, "b": 2}'), "malformed_call"),
    (calculate('{"op": "add", "a": 1, "b": -1e999}'), "malformed_call"),
    (calculate('{"op": "add", "a": NaN, "b": 2}'), "malformed_call"),
    (calculate('{"op": "add", "a": Infinity, "b": 2}'), "malformed_call"),
    (calculate('{"op": "add", "a": 1, "b": ' + "9" * 4000 + "}"), "bad_value"),
    (call_text("lookup", {"key": "kite"}), "missing_key"),
    (call_text("lookup", {"key": "x" * 9000}), "missing_key"),
    (call_text("convert", {"value": 3, "source": "m", "target": "miles"}), "unknown_unit"),
    (call_text("convert", {"value": 3, "source": "m", "target": "km"}), "unknown_unit"),
    (calculate('{"op": "divide", "a": 5, "b": 0}'), "division_by_zero"),
    (calculate('{"op": "divide", "a": 0, "b": -0.0}'), "division_by_zero"),
    (calculate('{"op": "multiply", "a": 1e14, "b": 1e14}'), "overflow"),
    (calculate('{"op": "divide", "a": 1e15, "b": 1e-320}'), "overflow"),
    ("Answer: 3", "wrong_answer"),
    ("Answer: " + "9" * 70, "wrong_answer"),
    ("Answer: " + "9" * 200, "no_answer"),
    ("I can not answer.", "no_answer"),
    ("", "no_answer"),
]
NAMES = [f"{kind}-{number}" for number, (_, kind) in enumerate(FAILURES)]


@pytest.mark.parametrize(("text", "kind"), FAILURES, ids=NAMES)
def test_a_wrong_action_leaves_an_error_site_of_its_kind(text: str, kind: str) -> None:
    running = session()
    result = running.step(text)
    assert result.error is not None
    assert (result.error.turn, result.error.error_kind) == (0, kind)
    assert result.error.hint_template_key == kind
    assert not running.outcome().success
    assert result.done == (kind in ("wrong_answer", "no_answer"))


@pytest.mark.parametrize(("text", "kind"), FAILURES, ids=NAMES)
def test_every_failure_has_a_short_hint_without_the_answer(text: str, kind: str) -> None:
    site = session().step(text).error
    assert site is not None
    hint = render_hint(site, format_number(ANSWER))
    assert len(hint) < 250
    assert "{" not in hint


@pytest.mark.parametrize(("text", "kind"), FAILURES, ids=NAMES)
def test_what_an_agent_reads_after_a_failure_is_short_valid_text(text: str, kind: str) -> None:
    running = session()
    running.step(text)
    for message in running.messages[2:]:
        assert message["content"].startswith("error: ")
        assert len(message["content"].encode()) < 200
        assert message["role"] == ("user" if kind == "malformed_call" else "tool")


def test_every_hint_template_belongs_to_a_failure_that_happens() -> None:
    of_other_tasks = {"tool_error", "tool_timeout"}
    assert {kind for _, kind in FAILURES} | of_other_tasks == set(TEMPLATES)


@pytest.mark.parametrize(
    ("word", "leaks"),
    [("57.25", True), ("5", False), ("25", False), ("257.25", False), ("-57.25", True)],
)
def test_a_hint_that_holds_the_answer_is_refused(word: str, leaks: bool) -> None:
    site = ErrorSite(0, "missing_key", "missing_key", {"key": word, "keys": "lamp, rope"})
    if leaks:
        with pytest.raises(HintLeak, match=r"57\.25"):
            render_hint(site, "57.25")
    else:
        assert word in render_hint(site, "57.25")


def test_an_unknown_hint_template_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'nonsense'.*no_answer"):
        render_hint(ErrorSite(0, "x", "nonsense", {}))


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculator", {"op": "add", "a": 2, "b": 3}, "5"),
        ("calculator", {"op": "subtract", "a": 2, "b": 3.5}, "-1.5"),
        ("calculator", {"op": "multiply", "a": 4.35, "b": 100}, "435"),
        ("calculator", {"op": "divide", "a": 100, "b": 3}, "33.333333"),
        ("calculator", {"op": "divide", "a": 1, "b": 10_000_000}, "0"),
        ("calculator", {"op": "divide", "a": -1, "b": 10_000_000}, "0"),
        ("calculator", {"op": "multiply", "a": 1e-200, "b": 1e-200}, "0"),
        ("calculator", {"op": "add", "a": LARGEST, "b": 0}, str(LARGEST)),
        ("lookup", {"key": "rope"}, "8"),
        ("convert", {"value": 1.5, "source": "days", "target": "hours"}, "36"),
    ],
)
def test_a_right_call_gives_its_number(
    name: str, arguments: dict[str, object], result: str
) -> None:
    running = session()
    running.step(call_text(name, arguments))
    assert running.messages[-1] == {"role": "tool", "tool_call_id": "call_0", "content": result}


@given(st.floats(-1e15, 1e15) | st.integers(-(10**15), 10**15))
def test_a_number_is_written_so_that_an_answer_reads_it_back(number: float) -> None:
    read = read_answer(f"Answer: {format_number(number)}")
    assert read is not None
    assert abs(read - number) <= 1e-6


@given(st.text(max_size=60) | st.text(alphabet='{}[]":, aNe1-', max_size=60))
def test_any_text_between_the_tags_is_a_turn_and_never_a_crash(body: str) -> None:
    result = session().step(f"{OPEN}{body}{CLOSE}")
    assert result.error is not None
    assert not result.done


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Answer: 1,234.5", 1234.5),
        ("The sum is 7.\nAnswer: -7 ", -7),
        ("Answer: .5", 0.5),
        ("Answer: 7 apples", None),
        ("Answer: ", None),
        ("Answer: nan", None),
    ],
)
def test_an_answer_is_the_number_at_the_end(text: str, value: float | None) -> None:
    assert read_answer(text) == value


def test_a_call_is_read_behind_a_text_and_never_before_one() -> None:
    text = f"First the lamp. {call_text('lookup', {'key': 'lamp'})} \n"
    assert parse_action(text) == ToolCall("lookup", {"key": "lamp"})
    assert isinstance(parse_action(f"{text}And then?"), MalformedCall)


def test_failed_calls_cost_their_penalty_and_never_more_than_the_reward() -> None:
    for failures, reward in ((0, 1.0), (1, 0.6), (2, 0.2), (3, 0.0)):
        running = session(max_turns=9, penalty=0.4)
        for _ in range(failures):
            running.step(call_text("abacus", {}))
        running.step("Answer: 57.25")
        assert running.outcome().success
        assert running.outcome().reward == pytest.approx(reward)


def test_the_last_turn_ends_an_episode_without_an_answer() -> None:
    running = session(max_turns=2)
    assert not running.step(call_text("lookup", {"key": "lamp"})).done
    last = running.step(call_text("lookup", {"key": "rope"}))
    outcome = running.outcome()
    assert (last.done, outcome.success, outcome.reward, last.messages) == (True, False, 0.0, [])
    assert last.error is not None
    assert (last.error.turn, last.error.error_kind) == (1, "no_answer")
    with pytest.raises(RuntimeError, match="start a new session"):
        running.step("Answer: 57.25")


def test_every_tool_is_described_to_agents_with_all_its_arguments() -> None:
    schemas = {name: tool.schema["function"] for name, tool in tools_of(ToolboxSession).items()}
    assert set(schemas["calculator"]["parameters"]["properties"]) == {"op", "a", "b"}
    assert schemas["lookup"]["parameters"]["required"] == ["key"]
    assert schemas["convert"]["parameters"]["required"] == ["value", "source", "target"]

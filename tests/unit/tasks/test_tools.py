"""Every way in which a call can be wrong, as the agent, the error site and the hint tell it.

Arguments of tools: every type that JSON can carry is accepted as its schema says.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import inspect
import ipaddress
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from composer_mesh import Session, tool
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
from composer_mesh.services.checks.task import example_arguments
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.numbers import LARGEST, format_number
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.tool import ToolSpec
from composer_mesh.tasks.toolbox import ToolboxTask

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
def test_a_wrong_action_leaves_an_error_site_a_short_hint_and_a_short_message(
    text: str, kind: str
) -> None:
    running = session()
    result = running.step(text)
    assert result.error is not None
    assert (result.error.turn, result.error.error_kind) == (0, kind)
    assert result.error.hint_template_key == kind
    assert not running.outcome().success
    assert result.done == (kind in ("wrong_answer", "no_answer"))
    hint = render_hint(result.error, format_number(ANSWER))  # raises if it holds the answer
    assert len(hint) < 250
    assert "{" not in hint
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


class Colour(enum.Enum):
    RED = "red"
    NONE = 0


class Size(enum.StrEnum):
    SMALL = "s"


class Point(BaseModel):
    x: int


class Visit(BaseModel):
    day: datetime.date


@dataclass
class Pair:
    a: int
    when: datetime.date


class Place(NamedTuple):
    name: str
    floor: int


DAY = datetime.date(2026, 1, 2)


CODE = "12345678-1234-5678-1234-567812345678"


VALUES: list[tuple[Any, Any, Any]] = [
    (int, 5, 5),
    (float, 5, 5.0),
    (int | str, "5", "5"),
    (Literal["red"], "red", "red"),
    (Colour, "red", Colour.RED),
    (Colour, 0, Colour.NONE),
    (Size, "s", Size.SMALL),
    (list[Colour], ["red", 0], [Colour.RED, Colour.NONE]),
    (Colour | None, None, None),
    (datetime.date, "2026-01-02", DAY),
    (datetime.datetime, "2026-01-02T03:04:05", datetime.datetime(2026, 1, 2, 3, 4, 5)),
    (datetime.time, "03:04:05", datetime.time(3, 4, 5)),
    (datetime.timedelta, "PT90S", datetime.timedelta(seconds=90)),
    (uuid.UUID, CODE, uuid.UUID(CODE)),
    (decimal.Decimal, "1.5", decimal.Decimal("1.5")),
    (decimal.Decimal, 0.1, decimal.Decimal("0.1")),
    (tuple[int, str], [1, "a"], (1, "a")),
    (set[str], ["a", "a"], {"a"}),
    (frozenset[int], [1], frozenset({1})),
    (bytes, "a", b"a"),
    (Path, "a/b", Path("a/b")),
    (ipaddress.IPv4Address, "127.0.0.1", ipaddress.IPv4Address("127.0.0.1")),
    (dict[datetime.date, int], {"2026-01-02": 1}, {DAY: 1}),
    (Point, {"x": 1}, Point(x=1)),
    (Visit, {"day": "2026-01-02"}, Visit(day=DAY)),
    (Pair, {"a": 1, "when": "2026-01-02"}, Pair(1, DAY)),
    (Place, ["hall", 2], Place("hall", 2)),
    (Annotated[decimal.Decimal, Field(ge=2)], 3, decimal.Decimal(3)),
]


def spec_of(kind: Any, name: str = "value") -> ToolSpec:
    def go(**_: Any) -> str:
        """Goes."""
        return "went"

    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    vars(go)["__signature__"] = inspect.Signature([parameter])
    go.__annotations__ = {name: kind}
    return ToolSpec(go, is_method=False)


@pytest.mark.parametrize(("kind", "given", "value"), VALUES)
def test_a_tool_gets_the_python_value_of_a_json_argument(kind: Any, given: Any, value: Any) -> None:
    assert spec_of(kind).checked({"value": given}) == {"value": value}


@pytest.mark.parametrize("kind", [kind for kind, _, _ in VALUES])
def test_an_argument_that_fits_the_shown_schema_is_accepted(kind: Any) -> None:
    spec = spec_of(kind)
    spec.checked(example_arguments(spec.schema["function"]["parameters"]))


@pytest.mark.parametrize(
    ("kind", "given", "error", "text"),
    [
        (int, "5", "wrong_type", "value must be a whole number"),
        (float, True, "wrong_type", "value must be a number"),
        (str, 5, "wrong_type", "value must be a string"),
        (datetime.date, 5, "wrong_type", "value must be a string"),
        (Point, "x", "wrong_type", "value must be an object"),
        (tuple[int, str], "a", "wrong_type", "value must be a list"),
        (datetime.date, "2026-13-01", "bad_value", "value: Input should be a valid date"),
        (uuid.UUID, "x", "bad_value", "value: Input should be a valid UUID"),
        (Colour, "blue", "bad_value", "value: Input should be 'red' or 0"),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_must_be(
    kind: Any, given: Any, error: str, text: str
) -> None:
    with pytest.raises(ToolError) as raised:
        spec_of(kind).checked({"value": given})
    assert raised.value.kind == error
    assert raised.value.text.startswith(text)


Positive = Annotated[int | float, Field(gt=0, le=9, multiple_of=2)]


class Titled(BaseModel):
    title: str
    size: Positive = 4


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (int | float, {"type": "number"}),
        (Positive, {"type": "number", "exclusiveMinimum": 0, "maximum": 9, "multipleOf": 2}),
        (
            Annotated[int, Field(ge=1, lt=3)],
            {"type": "integer", "minimum": 1, "exclusiveMaximum": 3},
        ),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    ],
)
def test_a_schema_has_standard_keywords_and_one_type_for_numbers(kind: Any, schema: Any) -> None:
    assert shown(kind) == schema
    assert shown(dict[str, kind]) == {"type": "object", "additionalProperties": schema}


def test_titles_are_left_out_of_schemas_but_not_arguments_of_that_name() -> None:
    whole = spec_of(list[Titled]).schema["function"]["parameters"]
    assert whole["$defs"]["Titled"] == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "size": {"default": 4, **shown(Positive)}},
        "required": ["title"],
    }
    assert spec_of(str, "title").schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
    }


def shown(kind: Any) -> Any:
    return spec_of(kind).schema["function"]["parameters"]["properties"]["value"]


@pytest.mark.parametrize("name", ["_x", "__x", "model_config", "model_fields", "copy", "json"])
def test_an_argument_may_have_any_name(name: str) -> None:
    spec = spec_of(int, name)
    assert list(spec.schema["function"]["parameters"]["properties"]) == [name]
    assert spec.checked({name: 3}) == {name: 3}


@pytest.mark.parametrize("kind", [range, Callable[[], int], Literal[Colour.RED]])
def test_a_type_that_json_cannot_carry_is_refused(kind: Any) -> None:
    with pytest.raises(UnusableTask, match=r"tool 'go' .*JSON"):
        spec_of(kind)


@pytest.mark.parametrize(
    "name",
    [
        *("reply", "close", "end", "start", "opening", "key", "row", "add_reward", "mcp", "tools"),
        *("own_tools", "task", "episode", "conversation", "ended", "turn_reward", "__init__"),
    ],
)
def test_a_tool_never_replaces_a_part_of_session(name: str) -> None:
    def act(self: Any) -> str:
        """Acts."""
        return "done"

    with pytest.raises(UnusableTask, match=f"replaces Session.{name}: give the method another"):
        type("Odd", (Session,), {name: tool(act)})
    mixin = type("Mixin", (), {name: tool(act)})
    with pytest.raises(UnusableTask, match=f"replaces Session.{name}"):
        type("Mixed", (mixin, Session), {})


def test_a_tool_may_be_shown_to_the_agent_by_the_name_of_a_part_of_session() -> None:
    class Desk(Session):
        @tool(name="reply")
        def answer_mail(self, text: str) -> str:
            """Answers a mail."""
            return text

    assert issubclass(Desk, Session)

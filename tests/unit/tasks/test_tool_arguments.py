"""Arguments of tools: every type that JSON can carry is accepted as its schema says."""

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
from pydantic import BaseModel, Field

from composer_mesh import Session, tool
from composer_mesh.services.checks.task import example_arguments
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.tool import ToolSpec


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

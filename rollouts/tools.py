"""The tools of the built-in tasks and their errors.

Pydantic checks the arguments; each failure has a kind, a hint template and the facts that a hint
may use. Model-written arguments are data and are never evaluated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_mesh.rollouts.tool_calls import ToolCall

Number = int | float
UNITS: dict[tuple[str, str], Fraction] = {
    ("weeks", "days"): Fraction(7),
    ("days", "hours"): Fraction(24),
    ("yards", "feet"): Fraction(3),
    ("feet", "inches"): Fraction(12),
    ("dozens", "pieces"): Fraction(12),
}
LARGEST = 10**15


class ToolError(Exception):
    """A failed call: `kind` names it, `text` is shown to the agent, `data` fills hint templates."""

    def __init__(self, kind: str, text: str, data: dict[str, str]) -> None:
        super().__init__(kind, text, data)
        self.kind, self.text, self.data = kind, text, data


class _Arguments(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class CalculatorArguments(_Arguments):
    op: Literal["add", "subtract", "multiply", "divide"]
    a: Number = Field(ge=-LARGEST, le=LARGEST)
    b: Number = Field(ge=-LARGEST, le=LARGEST)


class LookupArguments(_Arguments):
    key: str


class ConvertArguments(_Arguments):
    value: Number = Field(ge=-LARGEST, le=LARGEST)
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    arguments: type[_Arguments]
    run: Callable[[Any], Number]

    def schema(self) -> dict[str, Any]:
        """Return the tool in the format of OpenAI's `tools` parameter."""
        parameters = self.arguments.model_json_schema()
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": parameters["properties"],
                "required": parameters["required"],
            },
        }
        return {"type": "function", "function": function}


def _calculate(arguments: CalculatorArguments) -> Number:
    a, b = Fraction(arguments.a), Fraction(arguments.b)
    if arguments.op == "divide" and b == 0:
        raise ToolError(
            "division_by_zero",
            "division by zero",
            {"a": format_number(arguments.a), "b": format_number(arguments.b)},
        )
    operations: Mapping[str, Callable[[], Fraction]] = {
        "add": lambda: a + b,
        "subtract": lambda: a - b,
        "multiply": lambda: a * b,
        "divide": lambda: a / b,
    }
    return _plain(operations[arguments.op]())


def _convert(arguments: ConvertArguments) -> Number:
    factor = UNITS.get((arguments.source, arguments.target))
    if factor is None:
        pairs = ", ".join(f"{source} to {target}" for source, target in UNITS)
        wanted = f"{arguments.source} to {arguments.target}"
        raise ToolError("unknown_unit", f"cannot convert {wanted}", {"units": pairs})
    return _plain(Fraction(arguments.value) * factor)


def calculator() -> Tool:
    return Tool("calculator", "Computes a op b.", CalculatorArguments, _calculate)


def converter() -> Tool:
    return Tool("convert", "Converts a value between units.", ConvertArguments, _convert)


def lookup(table: Mapping[str, Number]) -> Tool:
    """Create the tool that reads the episode's own table."""

    def run(arguments: LookupArguments) -> Number:
        if arguments.key not in table:
            keys = ", ".join(sorted(table))
            text = f"no key {arguments.key[:40]}"
            raise ToolError("missing_key", text, {"key": arguments.key[:40], "keys": keys})
        return table[arguments.key]

    return Tool("lookup", "Reads the value of a key.", LookupArguments, run)


def execute(tools: Mapping[str, Tool], call: ToolCall) -> Number:
    """Run the call and return its result; raise ToolError for every kind of invalid call."""
    tool = tools.get(call.name)
    if tool is None:
        data = {"tool": call.name[:40], "tools": ", ".join(tools)}
        raise ToolError("unknown_tool", f"no tool {call.name[:40]}", data)
    try:
        arguments = tool.arguments.model_validate(call.arguments)
    except ValidationError as error:
        raise _argument_error(tool, error) from None
    return tool.run(arguments)


def _argument_error(tool: Tool, error: ValidationError) -> ToolError:
    first = error.errors()[0]
    field = str(first["loc"][0])[:40]
    fields = ", ".join(tool.arguments.model_fields)
    data = {"tool": tool.name, "argument": field, "arguments": fields}
    if first["type"] == "missing":
        return ToolError("missing_argument", f"{tool.name} needs {field}", data)
    if first["type"] == "extra_forbidden":
        return ToolError("unknown_argument", f"{tool.name} has no {field}", data)
    if first["type"] in ("literal_error", "less_than_equal", "greater_than_equal"):
        return ToolError("bad_value", f"{field}: {first['msg'][:80]}", data)
    wanted = "a string" if tool.arguments.model_fields[field].annotation is str else "a number"
    return ToolError("wrong_type", f"{field} must be {wanted}", {**data, "wanted": wanted})


def format_number(value: Number) -> str:
    """Format a number as agents read and write it: `12`, not `12.0`; at most 6 decimals."""
    if float(value).is_integer():
        return str(int(value))
    text = f"{value:.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _plain(value: Fraction) -> Number:
    if abs(value) > LARGEST:
        raise ToolError("overflow", "the result is too large", {"limit": str(LARGEST)})
    return int(value) if value.denominator == 1 else float(value)

"""Numbers of the built-in tasks: exact arithmetic and units, and how agents read and write them."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from composer_mesh.rollouts.consensus import read_answer
from composer_mesh.tasks.errors import ToolError
from composer_mesh.tasks.session import Reply

Number = int | float
LARGEST = 10**15
Bounded = Annotated[int | float, Field(ge=-LARGEST, le=LARGEST), WithJsonSchema({"type": "number"})]
"""A number within what tasks compute with. Schemas leave out bounds that no agent comes near: small
models' tokenizers write one token for each of their digits."""
Operation = Literal["add", "subtract", "multiply", "divide"]
UNITS: dict[tuple[str, str], Fraction] = {
    ("weeks", "days"): Fraction(7),
    ("days", "hours"): Fraction(24),
    ("yards", "feet"): Fraction(3),
    ("feet", "inches"): Fraction(12),
    ("dozens", "pieces"): Fraction(12),
}


def calculate(op: Operation, a: Number, b: Number) -> Number:
    """Return a op b; raise ToolError for a division by zero or a result that is too large."""
    first, second = Fraction(a), Fraction(b)
    if op == "divide" and second == 0:
        facts = {"a": format_number(a), "b": format_number(b)}
        raise ToolError("division_by_zero", "division by zero", facts)
    operations: Mapping[str, Callable[[], Fraction]] = {
        "add": lambda: first + second,
        "subtract": lambda: first - second,
        "multiply": lambda: first * second,
        "divide": lambda: first / second,
    }
    return _plain(operations[op]())


def convert_units(value: Number, source: str, target: str) -> Number:
    """Return a value in another unit; raise ToolError for units that do not convert."""
    factor = UNITS.get((source, target))
    if factor is None:
        pairs = ", ".join(f"{one} to {other}" for one, other in UNITS)
        raise ToolError("unknown_unit", f"cannot convert {source} to {target}", {"units": pairs})
    return _plain(Fraction(value) * factor)


def read_value(table: Mapping[str, Number], key: str) -> Number:
    """Return the value of a key; raise ToolError for one that is not in the table."""
    if key not in table:
        facts = {"key": key[:40], "keys": ", ".join(sorted(table))}
        raise ToolError("missing_key", f"no key {key[:40]}", facts)
    return table[key]


def format_number(value: Number) -> str:
    """Format a number as agents read and write it: `12`, not `12.0`; at most 6 decimals."""
    if float(value).is_integer():
        return str(int(value))
    text = f"{value:.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def judged(text: str, correct: Callable[[float], bool]) -> Reply:
    """Return the reply to an agent's last message, which has to be `Answer:` and a number."""
    value = read_answer(text)
    if value is None:
        return Reply(error=ToolError("no_answer", "no answer"))
    if not correct(value):
        facts = {"answer": format_number(value)}
        return Reply(error=ToolError("wrong_answer", "wrong answer", facts))
    return Reply()


def _plain(value: Fraction) -> Number:
    if abs(value) > LARGEST:
        raise ToolError("overflow", "the result is too large", {"limit": str(LARGEST)})
    return int(value) if value.denominator == 1 else float(value)

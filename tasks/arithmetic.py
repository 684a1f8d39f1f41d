"""Parser that turns written arithmetic into a chain of binary calculator calls.

`(3+4)*2` becomes two steps, the second of which refers to the result of the first. The parser does
not evaluate expressions; the calculator tool does.
"""

import re
from dataclasses import dataclass, field

from composer_mesh.tasks.numbers import Number
from composer_mesh.tasks.plans import Reference, Step

LONGEST = 200
_TOKEN = re.compile(r"\s*(\d+(?:,\d{3})*(?:\.\d*)?|\.\d+|[-+*/()%])", re.ASCII)
_OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}

Operand = Number | Reference


class NotArithmetic(ValueError):
    """The text contains anything but numbers, `+ - * / %` and parentheses."""


def append_steps(text: str, steps: list[Step]) -> Operand:
    """Append the calls that compute `text` to `steps`; return the operand that holds the result.

    Raises NotArithmetic, possibly after some steps were appended.
    """
    parser = _Parser(_tokens(text), steps)
    value = parser.sum()
    if parser.rest:
        raise NotArithmetic(f"{text!r} goes on after its end, at {parser.rest[-1]!r}")
    return value


def read_number(text: str) -> Number:
    """Parse `1,200`, `-3` or `0.5`; return an int if the value is integral."""
    value = float(text.replace(",", ""))
    return int(value) if value.is_integer() else value


def _tokens(text: str) -> list[str]:
    """Return the tokens of the text in reverse order."""
    if len(text) > LONGEST:
        raise NotArithmetic(f"{len(text)} characters are too many: at most {LONGEST} are read")
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotArithmetic(f"{text!r} holds {text[position]!r}, which is not arithmetic")
        tokens.append(match[1])
        position = match.end()
    return tokens[::-1]


@dataclass
class _Parser:
    """Recursive-descent parser: a sum of products of factors, left-associative."""

    rest: list[str]
    steps: list[Step] = field(default_factory=list)

    def sum(self) -> Operand:
        value = self._product()
        while self._next() in ("+", "-"):
            value = self._call(self.rest.pop(), value, self._product())
        return value

    def _product(self) -> Operand:
        value = self._factor()
        while self._next() in ("*", "/"):
            value = self._call(self.rest.pop(), value, self._factor())
        return value

    def _factor(self) -> Operand:
        token = self._take()
        if token == "-":
            return self._negative(self._factor())
        if token == "+":
            return self._factor()
        if token == "(":
            value = self.sum()
            if self._take() != ")":
                raise NotArithmetic("a parenthesis is not closed")
            return value
        if token in "*/)%":
            raise NotArithmetic(f"{token!r} stands where a number should")
        return self._percent(read_number(token))

    def _percent(self, value: Number) -> Number:
        if self._next() != "%":
            return value
        self.rest.pop()
        return read_number(str(value / 100))

    def _negative(self, value: Operand) -> Operand:
        return self._call("-", 0, value) if isinstance(value, Reference) else -value

    def _call(self, sign: str, a: Operand, b: Operand) -> Reference:
        self.steps.append(Step("calculator", {"op": _OPERATIONS[sign], "a": a, "b": b}))
        return Reference(len(self.steps) - 1)

    def _next(self) -> str:
        return self.rest[-1] if self.rest else ""

    def _take(self) -> str:
        if not self.rest:
            raise NotArithmetic("a number is missing at the end")
        return self.rest.pop()

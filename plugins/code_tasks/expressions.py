"""Expressions of one line, said in words: what the task "one_liners" asks for.

    the larger of a and 7, then times c    ->    max(a, 7) * c

Three names, digits, five first operations and four second ones: 6,300 expressions. Nothing is ever
evaluated as Python outside of a box.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

NAMES = "abc"
DIGITS = "23456789"
INFIX: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda x, y: x + y),
    "minus": ("-", lambda x, y: x - y),
    "times": ("*", lambda x, y: x * y),
    "modulo": ("%", lambda x, y: x % y),
}
CALLS: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "larger": ("max", max),
    "smaller": ("min", min),
}
FIRST = ("plus", "minus", "times", *CALLS)
BINDING = ("times", "modulo")
"""Second operations before which an infix one needs its parentheses."""

_TERM = f"[{NAMES}{DIGITS}]"
_WORDS = re.compile(
    rf"(?:the (?P<call>{'|'.join(CALLS)}) of (?P<cx>{_TERM}) and (?P<cy>{_TERM})"
    rf"|(?P<x>{_TERM}) (?P<op>plus|minus|times) (?P<y>{_TERM}))"
    rf"(?:, then (?P<then>{'|'.join(INFIX)}) (?P<z>{_TERM}))?"
)


@dataclass(frozen=True)
class Expression:
    """`first` applied to x and y, then perhaps `then` to that and z."""

    first: str
    x: str
    y: str
    then: str | None = None
    z: str = ""

    @property
    def words(self) -> str:
        """The expression as the agent is asked for it."""
        head = f"{self.x} {self.first} {self.y}"
        if self.first in CALLS:
            head = f"the {self.first} of {self.x} and {self.y}"
        return head if self.then is None else f"{head}, then {self.then} {self.z}"

    def python(self, parentheses: bool = True) -> str:
        """The expression in Python; without `parentheses` as one who forgets them writes it."""
        if self.first in CALLS:
            head = f"{CALLS[self.first][0]}({self.x}, {self.y})"
        else:
            head = f"{self.x} {INFIX[self.first][0]} {self.y}"
            if parentheses and self.then in BINDING:
                head = f"({head})"
        return head if self.then is None else f"{head} {INFIX[self.then][0]} {self.z}"

    def value(self, values: Mapping[str, int]) -> int:
        """The value for values of the names."""

        def of(term: str) -> int:
            return values[term] if term in NAMES else int(term)

        combine = (CALLS.get(self.first) or INFIX[self.first])[1]
        head = combine(of(self.x), of(self.y))
        return head if self.then is None else INFIX[self.then][1](head, of(self.z))

    def opposite(self) -> Expression:
        """Return the expression of one who takes one operation for its opposite."""
        pairs = {"plus": "minus", "minus": "plus", "larger": "smaller", "smaller": "larger"}
        return replace(self, first=pairs.get(self.first, "plus"))

    def without_second(self) -> Expression:
        """Return the expression of one who forgets the second operation."""
        return replace(self, then=None, z="")


def expression_of(words: str) -> Expression:
    """Return the expression that words ask for; raise ValueError for any others."""
    found = _WORDS.fullmatch(words)
    if found is None:
        raise ValueError(f"{words!r} asks for no expression of the task one_liners")
    x, y = found["x"] or found["cx"], found["y"] or found["cy"]
    return Expression(found["op"] or found["call"], x, y, found["then"], found["z"] or "")

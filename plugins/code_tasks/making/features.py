"""Features that a task can delete: functions, classes, and what only one group of tests reaches.

Bugs of repair tasks are mutations: one operator, number or constant of a function is another one.
"""

from __future__ import annotations

import hashlib
import io
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from composer_mesh.plugins.code_tasks.deletions import Deletion
from composer_mesh.plugins.code_tasks.judge.judged_task import file_of
from composer_mesh.plugins.code_tasks.making.functions import Function
from composer_mesh.plugins.code_tasks.making.package import Survey
from composer_mesh.plugins.code_tasks.static_rules import parsed

OTHERS = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "//": ("*",),
    "%": ("//",),
    "+=": ("-=",),
    "-=": ("+=",),
    "and": ("or",),
    "or": ("and",),
    "True": ("False",),
    "False": ("True",),
}
"""What may stand in place of a token."""

BINARY = frozenset({"+", "-", "%"})
"""Operators that are replaced only between two operands."""

_SIZES = (1, -1)


def mutants(body: str, most: int) -> list[str]:
    """Return at most so many bodies with one wrong token each, the same ones each time.

    A body is lines of a function without its first one. All tokens but one, the layout and the
    remarks stay.
    """
    found = [one for one in _mutants(body) if _compiles(one)]
    return sorted(found, key=lambda one: hashlib.sha256(one.encode()).digest())[:most]


def _mutants(body: str) -> Iterator[str]:
    lines = body.splitlines(keepends=True)
    tokens = _tokens(body)
    for place, one in enumerate(tokens):
        line, column = one.start
        before = tokens[place - 1] if place else None
        for other in _others(one, before):
            text = lines[line - 1]
            changed = text[:column] + other + text[column + len(one.string) :]
            yield "".join([*lines[: line - 1], changed, *lines[line:]])


def _others(one: tokenize.TokenInfo, before: tokenize.TokenInfo | None) -> Sequence[str]:
    if one.type == tokenize.NUMBER and one.string.isdecimal():
        return [str(int(one.string) + by) for by in _SIZES if int(one.string) + by >= 0]
    if one.type not in (tokenize.OP, tokenize.NAME):
        return ()
    if one.string in BINARY and not _is_operand(before):
        return ()
    return OTHERS.get(one.string, ())


def _is_operand(one: tokenize.TokenInfo | None) -> bool:
    """Whether an operator behind this token has two operands."""
    if one is None:
        return False
    if one.type == tokenize.NAME:
        return one.string not in OTHERS and one.string not in ("return", "in", "not", "if", "else")
    return one.type == tokenize.NUMBER or one.string in (")", "]", "}")


def _tokens(body: str) -> list[tokenize.TokenInfo]:
    """Return the tokens of an indented body; none where it is not whole."""
    try:
        return list(tokenize.generate_tokens(io.StringIO(body).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return []


def _compiles(body: str) -> bool:
    return parsed(f"def f():\n{textwrap.indent(textwrap.dedent(body), '    ')}") is not None


Kind = Literal["function", "class", "group", "files", "repair"]
MOST_REACHING = 40
MOST_OTHERS = 10
MOST_FUNCTIONS = 12
FEWEST_LINES_OF_MANY = 8
EMPTY, STUB = "raise NotImplementedError", "return None"


@dataclass(frozen=True)
class Feature:
    """Functions, by their number in the package, that one task deletes; and tests for it.

    `reaching` tests reach a function of it, `others` are further tests, which reach none. A
    repair has a `bug`: the body that stands in place of its function's.
    """

    kind: Kind
    name: str
    numbers: tuple[int, ...]
    functions: tuple[Function, ...]
    reaching: tuple[str, ...]
    others: tuple[str, ...]
    bug: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        """All tests that are tried."""
        return (*self.reaching, *self.others)

    @property
    def lines(self) -> int:
        """How many lines of code are deleted."""
        return sum(one.lines for one in self.functions)

    def deletions(self, statement: str = EMPTY) -> list[Deletion]:
        """Return its deletions, with a statement in place of each body, or with its bug."""
        if self.bug:
            return [Deletion(one.path, one.first, one.last, self.bug) for one in self.functions]
        return [one.replaced_by(statement) for one in self.functions]


def _numbered(feature: Feature) -> Feature:
    """Return a feature whose name has its first line: a property and its setter share theirs."""
    return replace(feature, name=f"{feature.name}:{feature.functions[0].line}")


class Features:
    """Finds the features of a package. `usable` are its functions by number."""

    def __init__(self, usable: dict[int, Function], survey: Survey) -> None:
        self._survey = survey
        self._usable = {
            number: one
            for number, one in usable.items()
            if number in survey.reached and number not in survey.at_import
        }

    def all(self) -> list[Feature]:
        """Return all features; no two delete the same functions."""
        found: dict[tuple[int, ...], Feature] = {}
        for one in (*self._single(), *self._classes(), *self._groups()):
            found.setdefault(one.numbers, one)
        named = Counter(one.name for one in found.values())
        return [_numbered(one) if named[one.name] > 1 else one for one in found.values()]

    def repairs(self, bugs: int) -> list[Feature]:
        """Return features with a bug in one function, at most so many bugs of each function."""
        return [
            replace(
                self._feature("repair", f"{one.target}:{one.line}:bug-{place}", [number]), bug=body
            )
            for number, one in self._usable.items()
            for place, body in enumerate(mutants(one.body, bugs))
        ]

    def _single(self) -> Iterator[Feature]:
        for number, one in self._usable.items():
            yield self._feature("function", one.target, [number])

    def _classes(self) -> Iterator[Feature]:
        classes: dict[str, list[int]] = {}
        for number, one in self._usable.items():
            if one.owner:
                classes.setdefault(f"{one.module}:{one.owner}", []).append(number)
        for name, numbers in classes.items():
            if len(numbers) > 1:
                yield self._feature("class", name, numbers)

    def _groups(self) -> Iterator[Feature]:
        """Yield the functions that only the tests of one class, or of one file, reach."""
        places: dict[str, set[str]] = {}
        for test in self._survey.tests:
            for place in {test.partition("[")[0].rpartition("::")[0], file_of(test)}:
                places.setdefault(place, set()).add(test)
        for place, tests in places.items():
            numbers = [one for one in self._usable if set(self._survey.reached[one]) <= tests]
            paths = {self._usable[one].path for one in numbers}
            lines = sum(self._usable[one].lines for one in numbers)
            if 1 < len(numbers) <= MOST_FUNCTIONS and lines >= FEWEST_LINES_OF_MANY:
                yield self._feature("files" if len(paths) > 1 else "group", place, numbers)

    def _feature(self, kind: Kind, name: str, numbers: Sequence[int]) -> Feature:
        reached = {test for one in numbers for test in self._survey.reached[one]}
        reaching = spread([one for one in self._survey.tests if one in reached], MOST_REACHING)
        files = {file_of(one) for one in reaching}
        others = [one for one in self._survey.tests if one not in reached and file_of(one) in files]
        functions = tuple(self._usable[one] for one in numbers)
        return Feature(
            kind,
            name,
            tuple(numbers),
            functions,
            tuple(reaching),
            tuple(spread(others, MOST_OTHERS)),
        )


def spread(tests: Sequence[str], most: int) -> list[str]:
    """Return at most so many of some tests, evenly over all.

    >>> spread(["a", "b", "c", "d"], 2)
    ['a', 'c']
    """
    if len(tests) <= most:
        return list(tests)
    return [tests[place * len(tests) // most] for place in range(most)]


def chosen(features: Sequence[Feature], limit: int | None) -> list[Feature]:
    """Return at most so many features, the same ones each time; those of more functions first."""
    if limit is None or len(features) <= limit:
        return list(features)
    several = [one for one in features if len(one.numbers) > 1]
    single = [one for one in features if len(one.numbers) == 1]
    ordered = sorted(several, key=_chance)[: limit // 3]
    taken = [*ordered, *sorted(single, key=_chance)][:limit]
    return [one for one in features if one in taken]


def _chance(feature: Feature) -> str:
    return hashlib.sha256(feature.name.encode()).hexdigest()

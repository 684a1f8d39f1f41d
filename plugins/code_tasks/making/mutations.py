"""Bugs for repair tasks: one operator, number or constant of a function's body is another one."""

from __future__ import annotations

import ast
import hashlib
import io
import textwrap
import tokenize
from collections.abc import Iterator, Sequence

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
    try:
        ast.parse(f"def f():\n{textwrap.indent(textwrap.dedent(body), '    ')}")
    except (SyntaxError, ValueError):
        return False
    return True

"""Formats whose calls are a Python list, `[weather(city="Paris"), now()]`: Llama 4, LFM2."""

import ast
import keyword
import re
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.call_formats.port import CallFormat, as_json, blocks, one_call
from composer_mesh.rollouts.tool_calls import (
    ParsedAction,
    ToolCall,
    Unreadable,
    unique,
)

MOST_CHARACTERS = 100_000
"""Of the calls of one action: Python's parser takes memory with the length of its text."""

_BEGINS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_TEXTS_AND_NAMES = re.compile(
    r"""(?s:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b[A-Za-z_]\w*\b(?=\s*(?:[(.]|=(?!=)))"""
)
_MARK = "ƛ"
"""Before a tool's or an argument's name that is a keyword of Python, while it is parsed."""
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonicCalls(CallFormat):
    """A list of calls with named literals, between two tokens or as the whole answer.

    It is parsed and never run. `true`, `false` and `null` are constants too.
    """

    name: str
    opening: str = ""
    closing: str = ""
    quote: str = '"'
    json_values: bool = False
    """Templates write mappings and lists as JSON."""

    def _read(self, text: str) -> ParsedAction:
        if self.opening:
            before, insides = blocks(text, self.opening, self.closing)
            if len(insides) > 1:
                raise Unreadable(f"write {self.opening} once, with a list of all calls")
        elif _BEGINS.match(text):
            before, insides = "", [text]
        else:
            return ParsedAction(text)
        calls = [call for inside in insides for call in _calls(inside.strip())]
        return ParsedAction(before, tuple(calls))

    def write(self, spoken: ParsedAction) -> str:
        if not spoken.calls:
            return spoken.text
        listed = ", ".join(self._text(call) for call in spoken.calls)
        return f"{spoken.text}{self.opening}[{listed}]{self.closing}"

    def _text(self, call: ToolCall) -> str:
        given = [f"{key}={self._literal(value)}" for key, value in call.arguments.items()]
        return f"{call.name}({', '.join(given)})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return _quoted(value, self.quote)
        if self.json_values and isinstance(value, dict | list):
            return as_json(value)
        return repr(value)


def _quoted(text: str, quote: str) -> str:
    """Return a Python literal of a text in the quotes of the family."""
    body = as_json(text)[1:-1]
    if quote == "'":
        body = body.replace('\\"', '"').replace("'", "\\'")
    return f"{quote}{body}{quote}"


def _calls(text: str) -> list[ToolCall]:
    if len(text) > MOST_CHARACTERS:
        raise Unreadable(f"the calls have {len(text):,} characters: write {MOST_CHARACTERS:,}")
    try:
        tree = ast.parse(_TEXTS_AND_NAMES.sub(_marked, text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("the calls are no Python list of calls") from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Unreadable("write the calls as a list: [NAME(ARGUMENT=VALUE)]")
    return [_call(node) for node in tree.elts]


def _marked(found: re.Match[str]) -> str:
    return _MARK + found[0] if keyword.iskeyword(found[0]) else found[0]


def _unmarked(name: str) -> str:
    return name[1:] if name.startswith(_MARK) and keyword.iskeyword(name[1:]) else name


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise Unreadable("write each call as NAME(ARGUMENT=VALUE), with names for all arguments")
    pairs = [(_unmarked(one.arg or ""), _value(one.value)) for one in node.keywords]
    if any(not name for name, _ in pairs):
        raise Unreadable("write each argument as NAME=VALUE")
    return one_call(_dotted(node.func), unique(pairs))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return _unmarked(node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{_unmarked(node.attr)}"
    raise Unreadable("the call needs the name of a tool")


def _value(node: ast.expr) -> Any:
    """Return the JSON value of a literal; nothing is evaluated. Raises `Unreadable`."""
    match node:
        case ast.Constant(value=value) if value is None or type(value) in (str, int, float, bool):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return unique(list(zip(map(_key, keys), map(_value, values), strict=True)))
    raise Unreadable("an argument is no literal: write texts, numbers, lists and mappings")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Unreadable("the keys of a mapping are texts")

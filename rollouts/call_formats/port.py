"""What a format of tool calls is, and what all of them read alike.

A reader is strict: text that opens a call and is not one is malformed, never an answer. The text is
untrusted and is never evaluated.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from composer_mesh.rollouts.tool_calls import MalformedCall, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool."""


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """An action: its text before the calls, thinking included, and its calls in order."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class CallFormat(Protocol):
    """How a family of models writes calls in the text of an action, without its stop token."""

    @property
    def name(self) -> str:
        """Its name in `policy.tool_calls`."""
        ...

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Tokens with which templates end an action that are not sampled as its last one."""
        ...

    def read(self, text: str, schemas: Schemas, /) -> ParsedAction | MalformedCall:
        """Return what an action says; `schemas` type the arguments of formats without types."""
        ...

    def write(self, spoken: ParsedAction) -> str:
        """Return the action's text, as chat templates write it; the inverse of `read`."""
        ...


class Unreadable(ValueError):
    """A call that is not well-formed; the text says why, for the policy to read."""


THINKING, THINKING_ENDS = "<think>", "</think>"


def apart_from_thinking(text: str, *openings: str) -> tuple[str, str]:
    """Return an action's thinking with its tags, and the text after it.

    A prompt may open the tag, so that only its end is sampled. An end behind an opening of a call
    is part of the call.
    """
    thinking, ends, answer = text.partition(THINKING_ENDS)
    begun = text.lstrip().startswith(THINKING)
    if not ends or (not begun and any(opening in thinking for opening in openings)):
        return "", text
    return thinking + ends, answer


def json_object(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object; raises `Unreadable`."""
    value = json_value(text, what)
    if not isinstance(value, dict):
        raise Unreadable(f"{what} are no JSON object")
    return value


def json_value(text: str, what: str) -> Any:
    """Parse a JSON value that can be stored; raises `Unreadable`."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except (ValueError, RecursionError):  # too many digits raise a plain ValueError
        raise Unreadable(f"{what} are no valid JSON") from None
    return value


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value of an argument that was written without quotes, by its schema.

    A text stays a text where the schema takes one; else it is JSON, where it is valid JSON.
    """
    if "string" in _types(schema):
        return text
    try:
        return json_value(text, "the value")
    except Unreadable:
        return text


def _types(schema: Mapping[str, Any] | None) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type")
    found = {stated} if isinstance(stated, str) else set(stated or ())
    for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        found |= _types(choice)
    return found


def schema_of(schemas: Schemas, tool: str, argument: str) -> Mapping[str, Any] | None:
    """Return the schema of one argument of a tool; None where neither is known."""
    properties = schemas.get(tool, {}).get("properties")
    return properties.get(argument) if isinstance(properties, Mapping) else None


def as_json(value: Any) -> str:
    """Return a value as the `tojson` filter of chat templates writes it."""
    return json.dumps(value, ensure_ascii=False)


def blocks(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """Return the text before the first block, and the insides of all blocks; nothing but white
    space may stand between or behind them. Raises `Unreadable`."""
    before, *rest = text.split(opening)
    if closing in before:
        raise Unreadable(f"a call is not opened by {opening}")
    insides = []
    for part in rest:
        inside, closed, after = part.partition(closing)
        if not closed:
            raise Unreadable(f"the call is not closed by {closing}")
        if closing in after:
            raise Unreadable(f"a call is not opened by {opening}")
        if after.strip():
            raise Unreadable(f"text stands behind {closing}: end with the call")
        insides.append(inside)
    return before, insides


def one_call(name: str, arguments: dict[str, Any], call_id: str = "") -> ToolCall:
    """Return a call; raises `Unreadable` where its name is none."""
    if not name or name != name.strip() or any(c.isspace() for c in name):
        raise Unreadable("the call needs the name of a tool")
    return ToolCall(name, arguments, call_id)


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return arguments by name; raises `Unreadable` for one that is given twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Unreadable(f"the argument {name[:60]!r} is given twice")
        found[name] = value
    return found

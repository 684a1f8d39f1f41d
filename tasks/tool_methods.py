"""Tools as methods of a class, as TRL finds them: with annotations and a docstring."""

from __future__ import annotations

import inspect
import keyword
import operator
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Literal, Protocol

RESERVED = frozenset({"reset", "get_reward"})
TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_REQUIRED: Any = inspect.Parameter.empty


class UnusableTools(ValueError):
    """Tools that cannot be methods of a class."""


class Called(Protocol):
    """An object with such methods."""

    def _call(self, tool: str, arguments: Mapping[str, Any], /) -> str: ...


def tool_method(name: str, description: str, schema: Mapping[str, Any]) -> Any:
    """Return a method that calls a tool by `_call`. Raises UnusableTools.

    `schema` is the JSON schema of its arguments.
    """
    if not _is_name(name) or name in RESERVED:
        raise UnusableTools(
            f"tool {name!r} cannot be a method that TRL finds: rename it with @tool(name=…)"
        )
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = set(schema.get("required", []))
    order = sorted(properties, key=lambda one: one not in required)
    parameters = [_parameter(name, one, properties[one], required) for one in order]

    def method(self: Called, **arguments: Any) -> str:
        return self._call(name, arguments)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__ = method.__qualname__ = name
    signature = inspect.Signature([own, *parameters], return_annotation=str)
    method.__signature__ = signature  # type: ignore[attr-defined]
    method.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": str}
    method.__doc__ = _docstring(name, description, properties, order)
    return method


def _parameter(
    tool: str, name: str, schema: Mapping[str, Any], required: set[str]
) -> inspect.Parameter:
    if not _is_name(name) or name == "self":
        raise UnusableTools(f"tool {tool!r} has an argument {name!r}, which Python cannot name")
    kind, default = _type_of(schema), _REQUIRED
    if name not in required:
        default = schema.get("default")
        kind = kind if default is not None else kind | None
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind
    )


def _type_of(schema: Mapping[str, Any]) -> Any:
    """Return the type of an argument; what it is made of is lost, and the server checks it."""
    values = schema.get("enum")
    if values and all(isinstance(one, str) for one in values):
        return Literal[tuple(values)]
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return _union([_type_of(one) for one in branches])
    kinds = schema.get("type", "object")
    names = kinds if isinstance(kinds, list) else [kinds]
    return _union([TYPES.get(name, dict) for name in names])


def _union(kinds: Sequence[Any]) -> Any:
    return reduce(operator.or_, kinds)


def _docstring(
    name: str, description: str, properties: Mapping[str, Any], order: Sequence[str]
) -> str:
    """Return a docstring in Google's style, one line for each part."""
    about = _line(description) or f"Call {name}."
    lines = [about]
    if order:
        lines += ["", "Args:"]
        notes = {one: _line(str(properties[one].get("description", ""))) for one in order}
        lines += [f"    {one}: {note or f'The {one}.'}" for one, note in notes.items()]
    return "\n".join([*lines, "", "Returns:", "    What the environment says."])


def _line(text: str) -> str:
    return " ".join(re.sub(r"\b(Args|Returns|Raises):", r"\1 -", text).split())


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text) and not text.startswith("_")

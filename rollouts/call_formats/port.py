"""What a format of tool calls is, and what all of them read alike.

A reader is strict: text that opens a call and is not one is malformed, never an answer. The text is
untrusted and is never evaluated.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ParsedAction,
    ToolCall,
    Unreadable,
    behind_thinking,
    json_at,
    space_ends,
)

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool."""

LITERALS: Mapping[str, Any] = {"True": True, "False": False, "None": None}
"""Values that templates write as Python does."""
TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class CallFormat(ABC):
    """How a family of models writes calls in the text of an action, without its stop token."""

    name: str
    """Its name in `policy.tool_calls`."""

    end_tokens: ClassVar[tuple[str, ...]] = ()
    """Tokens with which templates end an action that are not sampled as its last one."""

    def read(self, text: str, _: Schemas, /) -> ParsedAction | MalformedCall:
        """Return what an action says; the schemas type the arguments of formats without types."""
        return behind_thinking(text, self._read)

    @abstractmethod
    def write(self, spoken: ParsedAction) -> str:
        """Return the action's text, as chat templates write it; the inverse of `read`."""

    def _read(self, text: str) -> ParsedAction:
        """Return what stands behind the thinking, unless `read` does; raises `Unreadable`."""
        raise NotImplementedError(f"{type(self).__name__} defines neither read nor _read")


def json_object(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object; raises `Unreadable`."""
    value = json_value(text, what)
    if not isinstance(value, dict):
        raise Unreadable(f"{what} are no JSON object")
    return value


def json_value(text: str, what: str) -> Any:
    """Parse a JSON value that can be stored; raises `Unreadable`."""
    value, end = json_at(text, space_ends(text, 0))
    if space_ends(text, end) < len(text):
        raise Unreadable(f"text stands behind {what}")
    return value


def typed(text: str, kinds: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of an argument that was written without quotes, by the schemas it may fit.

    It is JSON, or a constant as Python writes it, where a schema takes that, or none takes a text.
    """
    try:
        value = LITERALS[text] if text in LITERALS else json_value(text, "the value")
    except Unreadable:
        return text
    if any(_fits(value, kind) for kind in kinds):
        return value
    return text if any(map(_takes_texts, kinds)) else value


def schemas_of(schemas: Schemas, tool: str, argument: str) -> list[Mapping[str, Any]]:
    """Return the schemas of one argument of a tool, of which it fits one; none if it is unknown."""
    whole = schemas.get(tool, {})
    properties = whole.get("properties")
    found = properties.get(argument) if isinstance(properties, Mapping) else None
    return list(_choices(found, whole))


def _choices(
    schema: Any, whole: Mapping[str, Any], deepest: int = 3
) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, or those that it is a choice of, with references followed."""
    if isinstance(schema, Mapping) and "$ref" in schema:
        part: Any = whole
        for name in str(schema["$ref"]).removeprefix("#/").split("/"):
            part = part.get(name) if isinstance(part, Mapping) else None
        schema = part
    if not isinstance(schema, Mapping) or not deepest:
        return
    choices = [one for key in ("anyOf", "oneOf", "allOf") for one in _listed(schema.get(key))]
    for one in choices:
        yield from _choices(one, whole, deepest - 1)
    if not choices:
        yield schema


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a schema takes a value that is no text."""
    types, stated = _types(schema), _stated(schema)
    if stated and not any(type(one) is type(value) and one == value for one in stated):
        return False
    return not types or any(type(value) in TYPES.get(one, ()) for one in types)


def _takes_texts(schema: Mapping[str, Any]) -> bool:
    return "string" in (_types(schema) or ["string" for one in _stated(schema) if type(one) is str])


def _types(schema: Mapping[str, Any]) -> list[str]:
    stated = schema.get("type")
    return [stated] if isinstance(stated, str) else list(map(str, _listed(stated)))


def _stated(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema lists, none if it lists no values."""
    return [schema["const"]] if "const" in schema else _listed(schema.get("enum"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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


def named_call(
    value: Any, named: str = "name", given: str = "arguments", call_id: str = ""
) -> ToolCall:
    """Return the call that a JSON object is, by the keys of its parts; raises `Unreadable`."""
    if not isinstance(value, dict) or not isinstance(value.get(named), str):
        raise Unreadable(f'the call needs a "{named}"')
    if not isinstance(value.get(given), dict):
        raise Unreadable(f'the call needs an object "{given}"')
    found = value.get(call_id) if call_id else None
    return one_call(value[named], value[given], str(found or ""))


def one_call(name: str, arguments: dict[str, Any], call_id: str = "") -> ToolCall:
    """Return a call; raises `Unreadable` where its name is none, or its arguments are no JSON."""
    if not name or name != name.strip() or any(c.isspace() for c in name):
        raise Unreadable("the call needs the name of a tool")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        raise Unreadable("an argument is no valid JSON: numbers are finite") from None
    return ToolCall(name, arguments, call_id)

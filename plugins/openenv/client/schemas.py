"""Tools of an environment, made from JSON schemas that its server wrote.

A schema is bounded, and its references are written out, before anything reads it; so checking
arguments costs time in proportion to them. Needs the extra `openenv`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import create

from composer_mesh.plugins.openenv.client.errors import shown
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.tool import MOST_SHOWN, ToolSpec

MOST_TOOLS = 128
MOST_NODES = 1_000
"""Schemas within a tool's schema, references written out."""

MOST_CHECKS = 1_000_000
"""Product of a schema's nodes and the values in the arguments of a call."""

DEEPEST = 16
LONGEST_TEXT = 2_000
"""Characters of a description."""

MOST_LISTED = 200
MOST_NUMBER = 1e300
NAMES = re.compile(r"[A-Za-z0-9_.-]{1,64}")

CHECKED = (
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "anyOf", "oneOf", "allOf"),
)
"""Keywords that arguments are checked by; the server checks them by all."""

NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
TEXTS = frozenset({"description", "pattern", "format"})
BRANCHES = frozenset({"anyOf", "oneOf", "allOf"})
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

KINDS = {"required": "missing_argument", "additionalProperties": "unknown_argument"}
"""Error kinds by the keyword that an argument offends; "type" is reported with what is wanted."""

_Validator: Any = create(
    meta_schema={},
    validators={name: Draft202012Validator.VALIDATORS[name] for name in CHECKED},
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


class SchemaToolSpec(ToolSpec):
    """A tool whose arguments are described by a JSON schema.

    The session's `function` gets its name and the checked arguments.
    """

    def __init__(
        self, name: str, description: str, schema: Mapping[str, Any], function: Callable[..., Any]
    ) -> None:
        """Raises UnusableTask for a name or a schema that cannot be used."""
        if not NAMES.fullmatch(name):
            raise UnusableTask(
                f"a tool is called {shown(name)!r}: names have 1 to 64 letters, digits and _ . -"
            )
        self.name, self.description = name, _storable(description)
        self.function, self.is_method, self.errors = function, True, {}
        self.parameters, self._nodes = bounded_schema(name, schema)
        self._validator = _Validator(self.parameters)

    @property
    def schema(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if (values := _count(arguments)) * self._nodes > MOST_CHECKS:
            facts = {"tool": self.name, "argument": "", "arguments": ""}
            raise ToolError("bad_value", f"{values:,} values are too many for {self.name}", facts)
        error: ValidationError | None = next(self._validator.iter_errors(dict(arguments)), None)
        if error is not None:
            raise self._refused(arguments, error)
        return {"name": self.name, "arguments": dict(arguments)}

    def _refused(self, arguments: Mapping[str, Any], error: ValidationError) -> ToolError:
        properties = self.parameters["properties"]
        argument = str(next(iter(error.absolute_path), ""))
        facts = {"tool": self.name, "argument": argument, "arguments": ", ".join(properties)}
        keyword = str(error.validator)
        if not argument and keyword in KINDS:
            wrong = self._offending(arguments, keyword)
            verb = "needs" if keyword == "required" else "has no"
            text = f"{self.name} {verb} {wrong}"
            return ToolError(KINDS[keyword], text, {**facts, "argument": wrong})
        if keyword == "type":
            wanted = _wanted(error.validator_value)
            text = f"{argument} must be {wanted}"
            return ToolError("wrong_type", text, {**facts, "wanted": wanted})
        wanted = shown(error.validator_value) if keyword not in BRANCHES else "one of its forms"
        return ToolError("bad_value", f"{argument} must have {keyword} {wanted}", facts)

    def _offending(self, arguments: Mapping[str, Any], keyword: str) -> str:
        """Return the first argument that is missing, or unknown."""
        known = self.parameters["properties"]
        if keyword == "required":
            missing = (name for name in self.parameters["required"] if name not in arguments)
        else:
            missing = (name for name in arguments if name not in known)
        return next(missing, "")[:MOST_SHOWN]


def bounded_schema(tool: str, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the schema of an object, without references, and the number of schemas in it.

    It has known keywords only, within bounds.

    Raises UnusableTask for one that is too large, too deep, or refers to itself or elsewhere.
    """
    reader = _Bounded(tool, schema)
    found = reader.read(schema, DEEPEST)
    if found.get("type", "object") != "object":
        raise UnusableTask(f"the arguments of tool {tool!r} are not an object in its schema")
    properties = found.get("properties", {})
    required = [name for name in found.get("required", []) if name in properties]
    whole = {**found, "type": "object", "properties": properties, "required": required}
    return whole, reader.nodes


class _Bounded:
    """Reads one tool's schema."""

    def __init__(self, tool: str, whole: Mapping[str, Any]) -> None:
        self._tool, self._whole, self.nodes = tool, whole, 0

    def read(self, schema: Any, depth: int) -> dict[str, Any]:
        """Return a schema's known part; `depth` is how deep it may go."""
        self.nodes += 1
        if self.nodes > MOST_NODES or depth <= 0:
            raise self._unusable(
                f"has more than {MOST_NODES:,} parts or is deeper than {DEEPEST}, references "
                "written out"
            )
        if schema is True or not isinstance(schema, Mapping):
            return {}
        if isinstance(schema.get("$ref"), str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return {
                **self.read(self._referred(schema["$ref"]), depth - 1),
                **self.read(rest, depth),
            }
        found = {}
        for key in (*CHECKED, *sorted(TEXTS), "default"):
            if key in schema and (value := self._value(key, schema[key], depth)) is not None:
                found[key] = value
        return found

    def _value(self, key: str, value: Any, depth: int) -> Any:
        """Return the value of a keyword; None if it has another form than it must have."""
        if key in TEXTS:
            return _storable(value) if isinstance(value, str) else None
        if key in NUMBERS | COUNTS:
            kinds = int | float if key in NUMBERS else int
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            return value if is_number and abs(value) <= MOST_NUMBER else None
        if key in ("const", "default"):
            return value if _is_small(value) else None
        if key in ("items", "additionalProperties"):
            return value if isinstance(value, bool) else self.read(value, depth - 1)
        if key == "properties":
            return self._properties(value, depth)
        return self._listed(key, value, depth)

    def _properties(self, value: Any, depth: int) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return None
        for name in value:
            if not NAMES.fullmatch(str(name)):
                raise self._unusable(f"has an argument {shown(name)!r}")
        return {str(name): self.read(one, depth - 1) for name, one in value.items()}

    def _listed(self, key: str, value: Any, depth: int) -> Any:
        if key == "type":
            names = [value] if isinstance(value, str) else value
            known = isinstance(names, list) and all(
                isinstance(one, str) and one in TYPES for one in names
            )
            return value if known and names else None
        if not isinstance(value, list) or not value:
            return None
        if len(value) > MOST_LISTED:
            raise self._unusable(f"lists {len(value):,} values in {key}, more than {MOST_LISTED}")
        if key in BRANCHES:
            return [self.read(one, depth - 1) for one in value]
        if key == "required":
            return [one for one in value if isinstance(one, str)]
        return value if all(map(_is_small, value)) else None

    def _referred(self, reference: str) -> Any:
        """Return the part of the schema that a reference names; nothing is looked for elsewhere."""
        part: Any = self._whole
        for name in reference.removeprefix("#/").split("/"):
            part = part.get(name) if isinstance(part, Mapping) else None
        if not reference.startswith("#/") or part is None:
            raise self._unusable(f"refers to {shown(reference)!r}, which is not in it")
        return part

    def _unusable(self, problem: str) -> UnusableTask:
        return UnusableTask(f"the schema of tool {self._tool!r} {problem}")


def _storable(text: str) -> str:
    """Return a description that is bounded, and has no lone surrogates."""
    return text[:LONGEST_TEXT].encode(errors="replace").decode()


def _count(value: Any) -> int:
    """Return the number of values in a JSON value, which its parser kept from being deep."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def _is_small(value: Any) -> bool:
    """Whether a value of an enumeration is bounded."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        return len(text.encode()) <= LONGEST_TEXT
    except (TypeError, ValueError, RecursionError):
        return False


def _wanted(kinds: Any) -> str:
    """Return a type, or several, in words."""
    words = {"string": "a string", "boolean": "true or false", "array": "a list", "null": "null"}
    words |= {"number": "a number", "integer": "a whole number", "object": "an object"}
    names = kinds if isinstance(kinds, list) else [kinds]
    return " or ".join(words.get(str(one), str(one)) for one in names)

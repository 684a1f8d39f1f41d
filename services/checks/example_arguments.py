"""Example arguments of a tool, made from its schema: the smallest that are valid where simple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_ITEMS = 100
DEEPEST = 8
FORMATS = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "time": "03:04:05",
    "duration": "PT1S",
    "uuid": "12345678-1234-4678-9234-567812345678",
    "ipv4": "127.0.0.1",
    "uri": "http://localhost/",
}
"""An example of each format of texts."""

Schema = Mapping[str, Any]


def example_arguments(parameters: Schema) -> dict[str, Any]:
    """Return an argument for each required parameter of a tool."""
    properties, shared = parameters.get("properties", {}), parameters.get("$defs", {})
    required = parameters.get("required", [])
    return {name: _example(properties.get(name, {}), shared, DEEPEST) for name in required}


def example_of(schema: Schema) -> Any:
    """Return an example of a JSON schema, with what it requires."""
    return _example(schema, schema.get("$defs", {}), DEEPEST)


def _example(schema: Schema, shared: Schema, depth: int) -> Any:
    if "$ref" in schema:
        schema = shared.get(str(schema["$ref"]).rpartition("/")[2], {})
    for chosen in ("default", "const"):
        if chosen in schema:
            return schema[chosen]
    choices = schema.get("enum") or schema.get("examples")
    if choices:
        return choices[0]
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options and depth:
        return _example(options[0], shared, depth - 1)
    return _by_type(schema, shared, depth)


def _by_type(schema: Schema, shared: Schema, depth: int) -> Any:
    match schema.get("type"):
        case "integer":
            return int(_number(schema, 1))
        case "number":
            return float(_number(schema, 0.5))
        case "boolean":
            return True
        case "null":
            return None
        case "array" if depth:
            count = min(schema.get("minItems", 0), MOST_ITEMS)
            items = schema.get("prefixItems") or [schema.get("items", {})] * count
            return [_example(one, shared, depth - 1) for one in items]
        case "object" if depth:
            names = schema.get("required", [])
            inner = schema.get("properties", {})
            return {name: _example(inner.get(name, {}), shared, depth - 1) for name in names}
        case "array":
            return []
        case "object":
            return {}
        case _:
            text = "a" * min(schema.get("minLength", 1), MOST_ITEMS) or "a"
            return FORMATS.get(schema.get("format", ""), text)


def _number(schema: Schema, step: float) -> float:
    """Return 1 if the bounds allow it, else the nearest number that they allow."""
    low = max(
        schema.get("minimum", -1e300), schema.get("exclusiveMinimum", -1e300 - step) + step, -1e300
    )
    high = min(schema.get("maximum", 1e300), schema.get("exclusiveMaximum", 1e300) - step)
    unit = schema.get("multipleOf", 1)
    return float(min(max(unit, low), high))

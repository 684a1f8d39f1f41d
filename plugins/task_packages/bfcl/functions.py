"""BFCL's functions as tools, made from their documents; bounds keep each call short.

An argument is what the document says, within bounds: text and lists have a length, numbers a size,
and a few arguments whose cost grows with them a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from composer_mesh.plugins.task_packages.named_tool import NamedTool
from composer_mesh.tasks.errors import UnusableTask

LONGEST_TEXT = 10_000
LONGEST_LIST = 200
LARGEST = 10**12
COSTLY = 1_000
"""Bound of exponents and precisions."""

COSTLY_ARGUMENTS = {
    ("power", "exponent"),
    ("logarithm", "precision"),
    ("square_root", "precision"),
    ("round_number", "decimal_places"),
}
TEXT_TOO = {("close_ticket", "ticket_id")}
"""Whole numbers that gold calls give as text."""

STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def function_tool(document: Mapping[str, Any], function: Callable[..., Any]) -> NamedTool:
    """Return a document's function as a tool; `function` is the session's method that calls it."""
    name = str(document["name"])
    arguments = _model(name, document["parameters"])
    return NamedTool(name, str(document["description"]), arguments, function)


def _model(name: str, parameters: Mapping[str, Any]) -> type[BaseModel]:
    required = set(parameters.get("required", ()))
    fields: dict[str, Any] = {}
    for key, one in parameters.get("properties", {}).items():
        default = ... if key in required else one.get("default")
        note = Field(default, description=one.get("description"))
        kind = _costly() if (name, key) in COSTLY_ARGUMENTS else _type(name, key, one)
        fields[key] = (kind, note)
    model: type[BaseModel] = create_model(f"{name}_arguments", __config__=STRICT, **fields)
    return model


def _type(name: str, key: str, one: Mapping[str, Any]) -> Any:
    kind = one.get("type")
    if kind == "array":
        items: Any = _type(name, key, one.get("items", {}))
        return Annotated[list.__class_getitem__(items), Field(max_length=LONGEST_LIST)]
    if kind == "dict":
        return _model(f"{name}_{key}", one) if one.get("properties") else dict[str, Any]
    types: dict[Any, Any] = {
        "string": Annotated[str, Field(max_length=LONGEST_TEXT)],
        "integer": Annotated[int, Field(ge=-LARGEST, le=LARGEST)],
        "float": Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)],
        "boolean": bool,
    }
    if (name, key) in TEXT_TOO:
        return types["integer"] | types["string"]
    if kind not in types:
        raise UnusableTask(f"argument {key!r} of bfcl's {name!r} has the unknown type {kind!r}")
    return types[kind]


def _costly() -> Any:
    return Annotated[float, Field(ge=-COSTLY, le=COSTLY, allow_inf_nan=False)]

"""Turns a pydantic complaint into one line: key, value, bound, repair.

Knows the schema only through its fields; reads no file.
"""

import difflib
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

# error type -> (bound, repair), filled from the error's own context
_TEXTS: dict[str, tuple[str, str]] = {
    "greater_than": ("must be above {gt}", "raise it above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "raise it to {ge} or more"),
    "less_than": ("must be below {lt}", "lower it below {lt}"),
    "less_than_equal": ("must be at most {le}", "lower it to {le} or less"),
    "literal_error": ("must be one of {expected}", "write one of these"),
    "int_type": ("must be a whole number", "write it without quotes or a decimal point"),
    "float_type": ("must be a number", "write it without quotes"),
    "finite_number": ("must be a finite number", "write an ordinary number"),
    "string_type": ("must be text", "put it in quotes"),
    "string_too_short": ("must not be empty", "write a name"),
    "string_pattern_mismatch": (
        "must match {pattern}",
        "use letters, digits, dots, dashes and underscores, and begin with a letter or digit",
    ),
    "path_type": ("must be the path of a file or folder", "put it in quotes"),
    "tuple_type": ("must be a list of tables", "write [[{key}]] once for each entry"),
    "model_type": ("must be a table", "write [{key}] and its keys below"),
}


class ConfigError(Exception):
    """A run that cannot be: one message, a line for each problem."""


def describe_all(root: type[BaseModel], error: ValidationError) -> list[str]:
    """One line for each problem that pydantic found."""
    return [_describe(root, problem) for problem in error.errors(include_url=False)]


def unknown_key(root: type[BaseModel], path: Sequence[str | int], value: object) -> str:
    """The line for a key that the schema does not have, with the nearest one it has."""
    return (
        f"{dotted(path)} = {shown(value)}: unknown key, must be one the schema has: "
        f"{_nearest(root, path)}"
    )


def shown(value: object) -> str:
    """A value as TOML would write it, cut where a whole table was given."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def dotted(path: Sequence[str | int]) -> str:
    """A key path as a reader of TOML would say it: `replay.teachers[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def section_at(root: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    """The section whose key the last part of `path` is, None when there is no such section."""
    section: type[BaseModel] | None = root
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section else None
        section = _section_of(field.annotation) if field else None
    return section


def _describe(root: type[BaseModel], problem: Mapping[str, Any]) -> str:
    path, value, context = problem["loc"], problem["input"], dict(problem.get("ctx", {}))
    kind = problem["type"]
    if kind == "extra_forbidden":
        return unknown_key(root, path, value)
    if kind == "missing":
        return f"{dotted(path)} is not set but every run needs it: add {_how_to_add(path)}"
    if kind == "value_error":
        where = dotted(path)
        return f"{where}: {context['error']}" if where else str(context["error"])
    bound, repair = _TEXTS.get(kind, (problem["msg"], "correct it"))
    context["key"] = dotted(path)
    return f"{dotted(path)} = {shown(value)}: {bound.format(**context)}: {repair.format(**context)}"


def _how_to_add(path: Sequence[str | int]) -> str:
    if len(path) == 1:
        return f"a table [{path[0]}]"
    return f"{path[-1]} = … under [{dotted(path[:-1])}]"


def _nearest(root: type[BaseModel], path: Sequence[str | int]) -> str:
    path = _up_to_the_unknown_part(root, path)
    key, section = str(path[-1]), section_at(root, path)
    siblings = list(section.model_fields) if section else []
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean {dotted([*path[:-1], near[0]])}?"
    if elsewhere := [name for name in _all_keys(root) if name.rsplit(".", 1)[-1] == key]:
        return f"did you mean {elsewhere[0]}?"
    if siblings:
        return f"remove it, or use one of {', '.join(siblings)}"
    return f"remove it, {dotted(path[:-1])} is not a table"


def _up_to_the_unknown_part(
    root: type[BaseModel], path: Sequence[str | int]
) -> Sequence[str | int]:
    for end, part in enumerate(path, start=1):
        section = section_at(root, path[:end])
        if isinstance(part, str) and (section is None or part not in section.model_fields):
            return path[:end]
    return path


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if child := _section_of(field.annotation):
            yield from _all_keys(child, f"{prefix}{name}.")


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section inside an annotation such as `Section` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        if found := _section_of(inner):
            return found
    return None

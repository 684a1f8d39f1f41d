"""Conversion of pydantic errors to one line each: key, value, bound, repair."""

import difflib
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from composer_mesh.configs import plugins
from composer_mesh.configs.validation import MANY_ERRORS, errors_of

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
    "string_too_long": ("must have at most {max_length} characters", "shorten it"),
    "too_short": ("must have at least {min_length} entries", "add one"),
    "too_long": ("must have at most {max_length} entries", "remove some"),
    "int_parsing_size": ("must be a number that fits its bounds", "write a smaller one"),
    "string_pattern_mismatch": (
        "must match {pattern}",
        "use letters, digits, dots, dashes and underscores, and begin with a letter or digit",
    ),
    "path_type": ("must be the path of a file or folder", "put it in quotes"),
    "tuple_type": ("must be a list of tables", "write [[{key}]] once for each entry"),
    "model_type": ("must be a table", "write [{key}] and its keys below"),
    "dict_type": ("must be a table", "write [{key}] and its keys below"),
    "bool_type": ("must be true or false", "write it without quotes"),
    "union_tag_invalid": ("type must be one of {expected_tags}", "write one of these"),
    "union_tag_not_found": ("must be a table with a type", 'write [{key}] and type = "…" below'),
}


LONGEST_LINE = 1000
MOST_WORDED = 20
LONGEST_KEY = 60


class ConfigError(Exception):
    """The config is invalid; the message has one line for each problem."""


def describe_all(root: type[BaseModel], error: ValidationError) -> list[str]:
    """Return one line for each problem that pydantic found; only the first are worded."""
    problems = errors_of(error, with_input=True)
    worded = [_describe(root, problem) for problem in problems[:MOST_WORDED]]
    return worded + [dotted(problem["loc"]) for problem in problems[MOST_WORDED:]]


def unknown_key(root: type[BaseModel], path: Sequence[str | int], value: object) -> str:
    """Return the error line of an unknown key, with the most similar known key."""
    return (
        f"{dotted(path)} = {shown(value)}: unknown key, must be one the schema has: "
        f"{nearest_key(root, path)}{'' if path[0] in root.model_fields else plugins.missing()}"
    )


def shown(value: object) -> str:
    """Format a value as JSON, truncated to 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    """Return a message as one printable line of bounded length, with its beginning and its end."""
    if len(text) > LONGEST_LINE:
        text = f"{text[: LONGEST_LINE - 200]} ... {text[-195:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def dotted(path: Sequence[str | int]) -> str:
    """Format a key path as in TOML: `replay.teachers[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in path)
    return text.removeprefix(".")


def _key(part: str) -> str:
    """Return a part of a key path, shortened if it is too long for a line."""
    return part if len(part) <= LONGEST_KEY else f"{part[: LONGEST_KEY - 3]}..."


def is_key(root: type[BaseModel], path: Sequence[str | int]) -> bool:
    """Return whether the schema has a key at this path; a free-form table has every key."""
    if path[-1] in keys_at(root, path):
        return True
    tables = [path[:end] for end in range(1, len(path)) if isinstance(path[end - 1], str)]
    return any(_is_free_table(root, table) for table in tables)


def keys_at(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the valid keys at the last part of `path`; none if its parent is not a table.

    If a table's `type` chooses among several sections, the keys of all of them.
    """
    keys = (key for section in _sections_at(root, path) for key in section.model_fields)
    return list(dict.fromkeys(keys))


def _describe(root: type[BaseModel], problem: Mapping[str, Any]) -> str:
    path, value = _without_tags(root, problem["loc"]), problem["input"]
    context = dict(problem.get("ctx", {}))
    kind = problem["type"]
    if kind == "extra_forbidden":
        if owners := _owners(root, path):
            return _key_of_another_type(path, value, problem["loc"], owners)
        return unknown_key(root, path, value)
    if kind == "missing":
        who = f"type {problem['loc'][-2]!r}" if len(path) < len(problem["loc"]) else "every run"
        return f"{dotted(path)} is not set but {who} needs it: add {_how_to_add(path)}"
    if kind == MANY_ERRORS:
        return f"{problem['msg']}: correct the first of them"
    if kind == "value_error":
        where = dotted(path)
        return f"{where}: {context['error']}" if where else str(context["error"])
    bound, repair = _TEXTS.get(kind, (problem["msg"], "correct it"))
    context["key"] = dotted(path)
    return f"{dotted(path)} = {shown(value)}: {bound.format(**context)}: {repair.format(**context)}"


def _key_of_another_type(
    path: Sequence[str | int], value: object, place: Sequence[str | int], owners: Sequence[str]
) -> str:
    key, chooser = dotted(path), dotted([*path[:-1], "type"])
    return (
        f"{key} = {shown(value)}: {chooser} {place[-2]!r} has no such key, only "
        f"{', '.join(repr(owner) for owner in owners)} has: remove it or change {chooser}"
    )


def _owners(root: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the `type` values of the table whose sections have the last key."""
    key = str(path[-1])
    sections = _sections_at(root, path)
    return [str(tag(s)) for s in sections if len(sections) > 1 and key in s.model_fields]


def _how_to_add(path: Sequence[str | int]) -> str:
    if len(path) == 1:
        return f"a table [{path[0]}]"
    return f"{path[-1]} = … under [{dotted(path[:-1])}]"


def nearest_key(root: type[BaseModel], path: Sequence[str | int]) -> str:
    """Return the repair of an unknown key: the most similar one, or those of its table."""
    path = _up_to_the_unknown_part(root, path)
    key, siblings = str(path[-1])[:LONGEST_KEY], keys_at(root, path)
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean {dotted([*path[:-1], near[0]])}?"
    if elsewhere := _first_keys(root).get(key):
        return f"did you mean {elsewhere}?"
    if siblings:
        return f"remove it, or use one of {', '.join(siblings)}"
    return f"remove it, {dotted(path[:-1])} is not a table"


def _up_to_the_unknown_part(
    root: type[BaseModel], path: Sequence[str | int]
) -> Sequence[str | int]:
    for end, part in enumerate(path, start=1):
        if isinstance(part, str) and not is_key(root, path[:end]):
            return path[:end]
    return path


def _without_tags(root: type[BaseModel], path: Sequence[str | int]) -> Sequence[str | int]:
    """Return the path as in the file: pydantic adds the `type` that chose a section."""
    found: list[str | int] = []
    sections = [root]
    for part in path:
        fields = [section.model_fields.get(str(part)) for section in sections]
        if isinstance(part, str) and len(sections) > 1 and not any(fields):
            chosen = [s for s in sections if tag(s) == part]
            sections = chosen or [s for s in sections if tag(s) is None] or sections
            continue
        found.append(part)
        if isinstance(part, str):
            sections = [s for field in fields if field for s in sections_of(field.annotation)]
    return found


@cache
def _first_keys(root: type[BaseModel]) -> dict[str, str]:
    """Return the first key of each name, by the name alone."""
    return {name.rsplit(".", 1)[-1]: name for name in reversed(list(_all_keys(root)))}


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for child in sections_of(field.annotation):
            yield from _all_keys(child, f"{prefix}{name}.")


def _sections_at(root: type[BaseModel], path: Sequence[str | int]) -> list[type[BaseModel]]:
    """Return the sections that may contain the last part of `path` as a key."""
    sections = [root]
    for part in path[:-1]:
        if isinstance(part, str):
            fields = [section.model_fields.get(part) for section in sections]
            sections = [s for field in fields if field for s in sections_of(field.annotation)]
    return sections


def _is_free_table(root: type[BaseModel], path: Sequence[str | int]) -> bool:
    fields = (section.model_fields.get(str(path[-1])) for section in _sections_at(root, path))
    return any(field and typing.get_origin(field.annotation) is dict for field in fields)


def sections_of(annotation: object) -> list[type[BaseModel]]:
    """Return the sections in an annotation such as `Section`, `tuple[Section, ...]` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in typing.get_args(annotation) for found in sections_of(inner)]


def tag(section: type[BaseModel]) -> str | None:
    """Return the value of `type` that selects this section."""
    field = section.model_fields.get("type")
    return next(iter(typing.get_args(field.annotation)), None) if field else None

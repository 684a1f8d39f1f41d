"""What each key of a config is, read from the schema: type, bounds, default and sentence.

`composer-mesh explain` and the reference of the documentation print it.
"""

import ast
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from composer_mesh.configs.base import Section
from composer_mesh.configs.errors import MOST_SUGGESTED, did_you_mean, nearest
from composer_mesh.configs.schema_keys import (
    LONGEST_KEY,
    dotted,
    is_key,
    keys_at,
    sections_of,
    tag,
    up_to_the_unknown_part,
)

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_LENGTHS = {"min_length": "at least {} long", "max_length": "at most {} long"}
_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}


class Key(NamedTuple):
    """A key of the schema, or a table of keys."""

    path: str
    """As in `--set`, with `[]` for each entry of a list: `replay.teachers[].name`."""

    types: tuple[str, ...]
    """Values of `type` with which its table has the key; none if it always does."""

    kind: str
    """Type of the value, in words."""

    bounds: str
    """The bounds of the value; empty if there are none."""

    default: str | None
    """The default as TOML writes it; None for a key that must be set."""

    text: str
    """The sentence under the field."""

    @property
    def value(self) -> str:
        """Type, bounds and default in one line."""
        default = "must be set" if self.default is None else f"default {self.default}"
        return ", ".join(
            filter(None, [self.kind, self.bounds, default if self.default != "" else ""])
        )


def keys(table: type[Section]) -> list[Key]:
    """Return all keys of a section and of the tables in it, in the order of the schema.

    A key that is the same with several values of its table's `type` is there once.
    """
    found: dict[tuple[str, ...], Key] = {}
    for one in _keys(table, ""):
        same = (one.path,) if one.path.endswith(".type") else (one.path, one.value, one.text)
        found[same] = _merged(found[same], one) if same in found else one
    return list(found.values())


def _merged(first: Key, other: Key) -> Key:
    types = tuple(dict.fromkeys([*first.types, *other.types]))
    kind = ", ".join(map(json.dumps, types)) if first.path.endswith(".type") else first.kind
    default = first.default if other.default is None else other.default
    return first._replace(types=types, kind=kind, default=default)


def _keys(table: type[Section], prefix: str) -> Iterator[Key]:
    sentences, types = _sentences(table), tuple(filter(None, [tag(table)]))
    for name, field in table.model_fields.items():
        kind, path = _kind(field.annotation), f"{prefix}{name}"
        text = sentences.get(name, "")
        yield Key(path, types, kind, _bounds(field), _default(field), text)
        inner = {"list of tables": f"{path}[].", "tables by name": f"{path}.NAME."}
        for one in sections_of(field.annotation):
            if issubclass(one, Section):
                yield from _keys(one, inner.get(kind, f"{path}."))


def explained(root: type[Section], path: str) -> list[Key]:
    """Return the keys at a path, written as in `--set`, or all of a name without dots.

    The path of a table returns the table, then the keys in it. Returns none for an unknown path.
    """
    wanted = [part for part in path.replace("[]", "").strip().split(".") if not part.isdecimal()]
    found = [(_parts(one), one) for one in keys(root)]
    here = [one for parts, one in found if _matches(parts, wanted)]
    inside = [one for parts, one in found if _matches(parts[:-1], wanted)]
    inside += [one for parts, one in found if _matches(parts[:-1], [*wanted, "NAME"])]
    named = [one for parts, one in found if parts[-1:] == wanted]
    return [*here, *inside] or named


SHORTEST_DESCRIPTION = 5
"""Letters of a word that is looked for in the sentences under the fields."""
LISTED = 6


def nearest_key(root: type[BaseModel], path: Sequence[str | int]) -> str:
    """Return the repair of an unknown key: up to three that may be meant, or how to list them.

    The first of these that finds any: keys of the same table that are spelled like it (for a word
    alone: keys of this name in any table), keys of its name, keys whose sentence has its words, and
    keys of any table that are spelled like it.
    """
    unknown = up_to_the_unknown_part(root, path)
    word, siblings = str(unknown[-1])[:LONGEST_KEY], keys_at(root, unknown)
    all_keys = sorted(_paths(root), key=lambda one: one.count("."))

    def of_name(*names: str) -> list[str]:
        return [one for name in names for one in all_keys if one.rpartition(".")[2] == name]

    here = [_with_rest(root, [*unknown[:-1], one], path) for one in nearest(word, siblings)]
    named, spelled = of_name(word), nearest(word, (one.rpartition(".")[2] for one in all_keys))
    ways = [named, here] if len(path) == 1 else [here, named]
    if siblings:
        ways += [_described(root, word), of_name(*spelled)]
    if found := next(filter(None, ways), None):
        return did_you_mean(list(dict.fromkeys(found))[:MOST_SUGGESTED])
    if not siblings:
        return f"remove it, {dotted(unknown[:-1])} is not a table"
    if len(siblings) <= LISTED:
        return f"remove it, or use one of {', '.join(siblings)}"
    table = ".".join(part for part in unknown[:-1] if isinstance(part, str))
    listing = f"composer-mesh explain {table}".rstrip()
    return f"remove it, or use a key that {listing} lists"


def _with_rest(root: type[BaseModel], table: Sequence[str | int], path: Sequence[str | int]) -> str:
    """Return the path with a known part in place of an unknown one, as far as it is known."""
    whole = [*table, *path[len(table) :]]
    return dotted(whole if is_key(root, whole) else table)


def _paths(root: type[BaseModel]) -> list[str]:
    return [one.path for one in keys(root)] if issubclass(root, Section) else []


def _described(root: type[BaseModel], word: str) -> list[str]:
    """Return keys whose sentence has the words of a name such as `learning_rate`."""
    words = word.replace("_", " ").lower()
    if len(words) < SHORTEST_DESCRIPTION or not issubclass(root, Section):
        return []
    found = [one.path for one in keys(root) if words in one.text.lower()]
    return sorted(found, key=lambda one: one.count("."))


def _parts(key: Key) -> list[str]:
    return key.path.replace("[]", "").split(".")


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(parts) == len(wanted) and all(
        part in (given, "NAME") for part, given in zip(parts, wanted, strict=True)
    )


@cache
def _sentences(table: type[Section]) -> dict[str, str]:
    """Return the string under each field of a section and its bases, by the field's name."""
    found: dict[str, str] = {}
    for one in reversed(table.__mro__):
        if not issubclass(one, Section):
            continue
        try:
            source = inspect.getsource(one)
        except OSError:  # a class without a file, which a package of plugins may have made
            continue
        (body,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _kind(annotation: Any) -> str:
    """Name a type in words."""
    if annotation in _NAMES:
        return _NAMES[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is typing.Literal:
        return ", ".join(json.dumps(one) for one in inner)
    if origin is tuple:
        kind = "table" if sections_of(annotation) else _kind(inner[0])
        return f"list of {kind}" if '"' in kind else f"list of {kind}s"
    if origin is dict:
        return "tables by name" if sections_of(annotation) else "table of any keys"
    if isinstance(annotation, type):
        return "table" if issubclass(annotation, Section) else annotation.__name__
    kinds = dict.fromkeys(_kind(one) for one in inner if one is not NoneType)
    return " or ".join(kinds)


def _bounds(field: FieldInfo) -> str:
    """Return the bounds of a value, also those of a type that is one of several."""
    found = {name: value for each in _constraints(field) for name, value in each.items()}
    limits = [f"{words} {_number(found[name])}" for name, words in _BOUNDS.items() if name in found]
    limits += [words.format(found[name]) for name, words in _LENGTHS.items() if name in found]
    return ", ".join(limits)


def _number(value: float) -> str:
    whole = value == int(value) and (isinstance(value, int) or abs(value) < 1e9)
    return f"{int(value):,}" if whole else f"{value:g}"


def _constraints(field: FieldInfo) -> Iterator[dict[str, Any]]:
    metadata = list(field.metadata)
    if typing.get_origin(field.annotation) in (typing.Union, UnionType):
        for one in typing.get_args(field.annotation):
            metadata += getattr(one, "__metadata__", ())
    for each in metadata:
        for limit in each.metadata if isinstance(each, FieldInfo) else [each]:
            found = {name: getattr(limit, name, None) for name in (*_BOUNDS, *_LENGTHS)}
            yield {name: value for name, value in found.items() if value is not None}


def _default(field: FieldInfo) -> str | None:
    """Write a default as TOML does; a table's is empty, as its keys have defaults of their own."""
    if field.is_required():
        return None
    value = field.default if field.default is not PydanticUndefined else None
    if field.default_factory is not None or isinstance(value, Section):
        return ""
    if isinstance(value, tuple) and any(isinstance(one, Section) for one in value):
        return f"{len(value)} tables"
    return "not set" if value is None else json.dumps(value, default=str)

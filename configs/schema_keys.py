"""Paths of keys in the schema: which there are, and how a message writes them."""

import typing
from collections.abc import Sequence

from pydantic import BaseModel

LONGEST_KEY = 60


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
    keys = (key for section in sections_at(root, path) for key in section.model_fields)
    return list(dict.fromkeys(keys))


def sections_at(root: type[BaseModel], path: Sequence[str | int]) -> list[type[BaseModel]]:
    """Return the sections that may contain the last part of `path` as a key."""
    sections = [root]
    for part in path[:-1]:
        if isinstance(part, str):
            fields = [section.model_fields.get(part) for section in sections]
            sections = [s for field in fields if field for s in sections_of(field.annotation)]
    return sections


def _is_free_table(root: type[BaseModel], path: Sequence[str | int]) -> bool:
    fields = (section.model_fields.get(str(path[-1])) for section in sections_at(root, path))
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


def up_to_the_unknown_part(root: type[BaseModel], path: Sequence[str | int]) -> Sequence[str | int]:
    for end, part in enumerate(path, start=1):
        if isinstance(part, str) and not is_key(root, path[:end]):
            return path[:end]
    return path

"""Every number, text and list of the schema is bounded."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel

from composer_mesh.configs.base import Section
from composer_mesh.configs.schema import Config


def leaves(annotation: Any, metadata: tuple[Any, ...], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Every type in an annotation with the bounds that hold for it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from leaves(field.annotation, tuple(field.metadata), f"{path}.{name}")
    elif origin is typing.Annotated:
        yield from leaves(inner[0], (*metadata, *_unfolded(inner[1:])), path)
    elif origin in (tuple, dict):
        yield path, origin, metadata
        for one in inner:
            yield from leaves(one, (), path)
    elif origin is not None and origin is not Literal:
        for one in inner:
            yield from leaves(one, metadata, path)
    else:
        yield path, annotation, metadata


def _unfolded(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for one in metadata:
        yield from getattr(one, "metadata", (one,))


LEAVES = list(leaves(Config, (), "config"))


def test_every_number_has_a_lower_and_an_upper_bound() -> None:
    numbers = [leaf for leaf in LEAVES if leaf[1] in (int, float)]
    assert len(numbers) > 150
    for path, _, metadata in numbers:
        assert any(isinstance(one, Ge | Gt) for one in metadata), path
        assert any(isinstance(one, Le | Lt) for one in metadata), path


def test_every_list_and_table_has_a_longest_length() -> None:
    many = [leaf for leaf in LEAVES if leaf[1] in (tuple, dict)]
    assert len(many) > 15
    for path, kind, metadata in many:
        assert any(isinstance(one, MaxLen) for one in metadata), (path, kind)


def test_every_text_has_a_longest_length() -> None:
    assert Section.model_config["str_max_length"] == 10_000
    kinds = {kind for _, kind, _ in LEAVES if isinstance(kind, type)} - {Any}
    assert kinds == {int, float, str, bool, tuple, dict, Path, type(None)}

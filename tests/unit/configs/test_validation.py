"""Validation ends at the first error, and one error is described however many there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from composer_mesh.configs.validation import (
    MANY_ERRORS,
    MOST_ERRORS,
    errors_of,
    fail_fast,
    first_error,
    place_and_text,
    validated,
    validated_json,
)

MANY = 100_000
Count = Annotated[int, Field(ge=0)]


class Inner(BaseModel):
    counts: list[Count] = []
    metadata: dict[str, Count] = {}


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    type: list[Inner] = field(default_factory=list)
    default: tuple[Count, ...] = ()
    members: set[Count] = field(default_factory=set)
    again: list[Outer] = field(default_factory=list)
    pairs: list[tuple[int, str]] | dict[str, list[Count]] = field(default_factory=list)


class Refusing(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = ""


BAD = [-1] * MANY
OUTER = fail_fast(Outer)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"inner": {"counts": BAD}}, "inner.counts.0"),
        ({"inner": {"counts": [0, 1, *BAD]}}, "inner.counts.2"),
        ({"inner": {"metadata": {str(one): -1 for one in range(MANY)}}}, "inner.metadata.0"),
        ({"type": [{"counts": BAD}] * 3}, "type.0.counts.0"),
        ({"type": BAD}, "type.0"),
        ({"default": BAD}, "default.0"),
        ({"members": list(range(-MANY, 0))}, "members.0"),
        ({"again": [{"again": [{"default": BAD}]}]}, "again.0.again.0.default.0"),
    ],
)
def test_a_collection_at_any_depth_ends_at_its_first_invalid_entry(
    value: dict[str, Any], place: str
) -> None:
    readers: list[Callable[[], Outer]] = [
        lambda: OUTER.validate_python(value),
        lambda: OUTER.validate_json(json.dumps(value)),
    ]
    for read in readers:
        with pytest.raises(ValidationError) as refused:
            read()
        assert refused.value.error_count() == 1
        assert place_and_text(refused.value).startswith(f"{place}: Input should be")


def test_a_model_that_is_built_on_first_use_fails_fast_too() -> None:
    class Deferred(BaseModel):
        model_config = ConfigDict(defer_build=True)

        counts: list[Count]

    with pytest.raises(ValidationError) as refused:
        validated(Deferred, {"counts": BAD})
    assert refused.value.error_count() == 1
    assert validated(Deferred, {"counts": [1]}).counts == [1]


def test_each_alternative_of_a_value_has_one_error() -> None:
    with pytest.raises(ValidationError) as refused:
        OUTER.validate_python({"pairs": {str(one): BAD for one in range(3)}})
    assert refused.value.error_count() == 2


def test_valid_values_are_what_pydantic_makes_of_them() -> None:
    value = {"inner": {"counts": [1], "metadata": {"a": 2}}, "default": [3], "pairs": {"b": [4]}}
    assert OUTER.validate_python(value) == Outer(
        Inner(counts=[1], metadata={"a": 2}), default=(3,), pairs={"b": [4]}
    )
    assert validated(Inner, {}) == validated_json(Inner, "{}") == Inner()


def test_more_errors_than_are_described_are_one_with_their_number() -> None:
    extra = {str(one): 0 for one in range(MOST_ERRORS + 1)}
    with pytest.raises(ValidationError) as refused:
        validated(Refusing, extra)
    assert refused.value.error_count() == MOST_ERRORS + 1
    assert [one["type"] for one in errors_of(refused.value)] == [MANY_ERRORS]
    assert place_and_text(refused.value) == f"{MOST_ERRORS + 1} values are invalid"


def test_an_error_has_its_input_only_on_request() -> None:
    with pytest.raises(ValidationError) as refused:
        validated(Refusing, {"name": 3})
    assert "input" not in first_error(refused.value)
    assert first_error(refused.value, with_input=True)["input"] == 3

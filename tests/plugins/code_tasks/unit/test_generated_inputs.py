"""Inputs that are made of recorded ones stay within what was recorded, and are new."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_mesh.plugins.code_tasks.making.hidden_cases import (
    generated_calls,
    type_of,
    varied,
)
from composer_mesh.plugins.code_tasks.values import decode, encode

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-50, 50)
    | st.sampled_from([2**60, -(2**70)])
    | st.floats(-5, 5)
    | st.sampled_from([float("inf"), float("nan")])
    | st.text("abc", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("xy", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def call(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    """A recorded call of one function."""
    named = {name: encode(one) for name, one in keywords.items()}
    return {"target": "m:f", "arguments": [encode(one) for one in arguments], "keywords": named}


@given(st.lists(VALUES, min_size=1, max_size=5), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_varied_value_has_the_type_of_the_one_in_its_place(values: list[Any], seed: int) -> None:
    seen = [encode(one) for one in values]
    made = varied(seen[0], seen, random.Random(seed))
    assert type_of(made) == type_of(seen[0])
    assert encode(decode(made)) == made
    same = [one for one in values if type(one) is type(values[0])]
    if type(values[0]) in (int, float) and any(map(math.isfinite, same)):
        finite = [one for one in same if math.isfinite(one)]
        made = decode(made)
        assert min(finite) <= made <= max(finite) or not math.isfinite(made)
    if type(values[0]) is list:
        assert min(map(len, same)) <= len(made["list"]) <= max(map(len, same))
    if type(values[0]) is dict:
        assert decode(made).keys() in [one.keys() for one in same]


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_generated_calls_are_new_and_the_same_each_time(values: list[tuple[Any, Any]]) -> None:
    recorded = [call(first, named=second) for first, second in values]
    made = generated_calls(recorded, 5)
    keys = [json.dumps(one, sort_keys=True) for one in (*recorded, *made)]
    assert len(made) <= 5
    assert len(set(keys)) == len({json.dumps(one, sort_keys=True) for one in recorded}) + len(made)
    assert generated_calls(recorded, 5) == made
    assert generated_calls(recorded, 0) == []


def test_arguments_are_exchanged_between_calls_and_objects_stay_whole() -> None:
    one = {"object": ["m:C", [1], {}]}
    other = {"object": ["m:C", [2], {"x": True}]}
    recorded = [
        {"target": "m:C.f", "arguments": [one, 1], "keywords": {}},
        {"target": "m:C.f", "arguments": [other, 9], "keywords": {}},
    ]
    made = generated_calls(recorded, 8)
    assert made
    assert all(call["arguments"][0] in (one, other) for call in made)
    assert all(1 <= call["arguments"][1] <= 9 for call in made)


@pytest.mark.parametrize("recorded", [[call()], [call(1)], [call(True), call(None)]])
def test_what_cannot_be_varied_has_no_generated_calls(recorded: list[dict[str, Any]]) -> None:
    assert generated_calls(recorded, 4) == []

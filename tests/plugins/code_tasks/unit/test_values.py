"""Values as tagged JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from composer_mesh.plugins.code_tasks.values import decode, encode

VALUES = [
    *(None, True, 0, -7, 2**80, 1.5, -0.0, math.inf, "a\ud800", 2j, b"\x00\xff", bytearray(b"x")),
    *([1, [2.0]], (1, (2,)), {"a": 1, 2: (3,)}, {1, 2}, frozenset({"b"}), [], (), {}, {(1, 2): {}}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_same_with_its_type_after_json(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


class Likeness(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [object(), Likeness(), len, range(3), type, [object()]],
    ids=["object", "subclass", "function", "range", "type", "nested"],
)
def test_no_other_type_is_encoded(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="levels"):
        encode(value)


@pytest.mark.parametrize("found", [[1], {}, {"a": 1, "b": 2}, {"eval": "1"}, {"list": 3}])
def test_other_json_is_no_value(found: Any) -> None:
    with pytest.raises(ValueError, match="tagged JSON"):
        decode(found)

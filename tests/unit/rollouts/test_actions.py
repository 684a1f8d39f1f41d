"""Equivalence: which spellings are one action, and which differences make another one."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preferences import ADD, ANSWER, BROKEN, LOOK

from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.tool_calls import call_text


def raw(arguments: str, name: str = "f") -> str:
    """A call whose arguments are spelled by hand."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ADD, call_text("calculator", {"b": 3.0, "a": 2, "op": "add"})),
        (ADD, ADD.replace(" ", "").replace("\n", "")),
        (ADD, f"Let me add these.\n{ADD}"),
        (raw('{"x": 2}'), raw('{"x": 2.0}')),
        (raw('{"x": 1}'), raw('{"x": 1e0}')),
        (raw('{"x": 1000}'), raw('{"x": 1E3}')),
        (raw('{"x": 0}'), raw('{"x": -0.0}')),
        (raw('{"x": 0.1}'), raw('{"x": 0.10}')),
        (raw('{"x": 100000000000000000000}'), raw('{"x": 1e20}')),
        (raw('{"x": "\\u00e9"}'), raw('{"x": "é"}')),
        (raw('{"x": "e\\u0301"}'), raw('{"x": "é"}')),
        (raw('{"e\\u0301": 1}'), raw('{"é": 1}')),
        (raw('{"x": {"b": [1.0, null], "a": true}}'), raw('{"x":{"a":true,"b":[1,null]}}')),
        (raw('{"x": "<tool_call>"}'), raw('{"x": "\\u003ctool_call>"}')),
        (ADD, f"<think>{LOOK} or <tool_call>?</think>\n{ADD}"),
        ("Answer: 5", "The sum of both is five.\nAnswer: 5.0"),
        ("Answer: 1,000", "Answer: 1000"),
        ("I can not  answer.", "i can not answer."),
        ("Straße", "STRASSE"),
        ("cafe\u0301", "CAFÉ"),
        ("<think>\nHm, is it Paris?\n</think>\n\nParis", "Paris"),
    ],
)
def test_spelling_does_not_make_another_action(one: str, other: str) -> None:
    assert canonical_action(one).agrees(canonical_action(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (raw('{"x": 2}'), raw('{"x": "2"}')),
        (raw('{"x": 1}'), raw('{"x": true}')),
        (raw('{"x": 1.0}'), raw('{"x": true}')),
        (raw('{"x": 0}'), raw('{"x": false}')),
        (raw('{"x": null}'), raw("{}")),
        (raw('{"x": null}'), raw('{"x": false}')),
        (raw('{"x": 9007199254740993}'), raw('{"x": 9007199254740992}')),
        (raw('{"x": [1, 2]}'), raw('{"x": [2, 1]}')),
        (raw('{"x": {}}'), raw('{"x": []}')),
        (raw('{"x": "Lamp"}'), raw('{"x": "lamp"}')),
        (raw('{"x": "a b"}'), raw('{"x": "a  b"}')),
        (raw('{"x": "2²"}'), raw('{"x": "22"}')),
        (raw('{"x": 1}', "f"), raw('{"x": 1}', "F")),
        (ADD, call_text("math", {"op": "add", "a": 2, "b": 3})),
        (ADD, call_text("calculator", {"op": "add", "a": 3, "b": 2})),
        ("Answer: 5", "Answer: 6"),
        ("Answer: 5", "5"),
        ("Answer: 5", "Answer: 5."),
        (ADD, "Answer: 5"),
    ],
)
def test_another_meaning_is_another_action(one: str, other: str) -> None:
    assert not canonical_action(one).agrees(canonical_action(other))


@pytest.mark.parametrize(
    "text",
    [
        BROKEN,
        "",
        " \n",
        "<think>\nI wonder.\n</think>\n",
        raw('{"x": 1, "x": 2}'),
        f"{ADD} Done.",
        f"<think>{ADD}",
        raw('{"x": NaN}'),
        raw('{"x": [-Infinity]}'),
        raw('{"x": 1e999}'),
        raw('{"e\\u0301": 1, "é": 2}'),
        raw("[1]"),
        f"{ADD}\n{LOOK}",
        f"{ADD}\n{ADD}",
    ],
)
def test_what_has_no_meaning_agrees_with_nothing_not_even_itself(text: str) -> None:
    key = canonical_action(text)
    assert key.kind == "malformed"
    assert not key.agrees(key)


@pytest.mark.parametrize(("depth", "kind"), [(50, "call"), (900, None), (100_000, "malformed")])
def test_no_depth_of_arguments_breaks_the_comparison(depth: int, kind: str | None) -> None:
    deep = "[" * depth + "]" * depth
    assert kind in (None, canonical_action(raw(f'{{"x": {deep}}}')).kind)


NUMBERS = st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3)


@given(arguments=ARGUMENTS, indent=st.sampled_from([None, 0, 3]), ascii_only=st.booleans())
def test_no_way_to_write_json_changes_a_call(
    arguments: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    turned = dict(reversed(arguments.items()))
    other = canonical_action(raw(json.dumps(turned, indent=indent, ensure_ascii=ascii_only)))
    one = canonical_action(call_text("f", arguments))
    assert one == other


@given(number=NUMBERS)
def test_numbers_are_one_where_python_says_so(number: float) -> None:
    others = [number + 1, number / 2, -number, int(number), float(int(number))]
    for other in others:
        one, two = (canonical_action(call_text("f", {"x": value})) for value in (number, other))
        assert (one == two) == (number == other)


@given(text=st.text(max_size=40))
def test_words_are_one_in_each_of_unicodes_canonical_forms(text: str) -> None:
    composed, apart = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert canonical_action(composed).kind == canonical_action(apart).kind
    if canonical_action(composed).kind == "words":
        assert canonical_action(composed) == canonical_action(apart)


@given(one=st.text(max_size=20) | st.just(ANSWER), other=st.text(max_size=20))
def test_a_class_has_one_name(one: str, other: str) -> None:
    first, second = canonical_action(one), canonical_action(other)
    assert (first.name == second.name) == (first == second)

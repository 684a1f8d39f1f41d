"""Texts of others in normal forms: as Unicode has them, but for endless runs of marks."""

from __future__ import annotations

import html
import random
import unicodedata

import pytest

from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.tool_calls import (
    MOST_MARKS,
    MalformedCall,
    normal_form,
    parse_action,
    unescaped,
)

SIGNS = ["a", "\u0301", "\u0323", "\u00e9", "\uac00", "\u3099", "\u304b", "\ufb01", "\u0345", " "]


def test_a_text_is_in_the_normal_form_of_unicode() -> None:
    chance = random.Random(52)
    for _ in range(5000):
        text = "".join(chance.choices(SIGNS, k=chance.randrange(MOST_MARKS)))
        assert normal_form("NFC", text) == unicodedata.normalize("NFC", text)
        assert normal_form("NFKC", text) == unicodedata.normalize("NFKC", text)


def test_endless_marks_are_parted_where_unicode_parts_them() -> None:
    found = normal_form("NFC", "a" + "\u0323\u0301" * 100)
    runs = found.split("\u034f")
    assert max(map(len, runs)) <= MOST_MARKS + 1
    assert sum(map(len, map(unicodedata.normalize, ["NFD"] * len(runs), runs))) == 201


@pytest.mark.parametrize(
    "text", ["&#52;", "&#0000000000052;", "&amp;&#x34;", "&#00000000;", "&#9;"]
)
def test_references_are_resolved(text: str) -> None:
    assert unescaped(text) == html.unescape(text)


def test_a_reference_of_thousands_of_digits_is_no_error() -> None:
    endless = "&#" + "9" * 5000
    assert unescaped(endless) == "\ufffd"
    assert not holds_answer(endless, "42")
    assert isinstance(parse_action(f'<tool_call error="{endless}">\n'), MalformedCall)

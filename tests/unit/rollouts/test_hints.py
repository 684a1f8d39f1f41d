"""Hint templates and the leak check: what a hint may say, and where its fields come from.

Texts of others in normal forms: as Unicode has them, but for endless runs of marks.
"""

from __future__ import annotations

import html
import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.hints import (
    TEMPLATES,
    HintLeak,
    HintTemplateError,
    HintTemplates,
    render_hint,
)
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.tool_calls import (
    MOST_MARKS,
    MalformedCall,
    normal_form,
    parse_action,
    unescaped,
)
from composer_mesh.rollouts.traces import ErrorSite

TELLS = [
    ("use 12 here", "12"),
    ("12", "12"),
    ("(12).", "12"),
    ("12.0", "12"),
    ("57.250", "57.25"),
    ("1.2e1", "12"),
    ("12km", "12"),
    ("5-12", "12"),
    ("1,234 or so", "1234"),
    ("1 234", "1234"),
    ("1234", "1,234"),
    ("the values 12 100", "12"),
    ("\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT TWO}", "12"),
    ("1\N{ZERO WIDTH SPACE}2", "12"),
    ("\N{MINUS SIGN}3", "-3"),
    ("Twelve of them", "12"),
    ("twenty-five", "25"),
    ("two hundred and twenty five", "225"),
    ("two and three", "3"),
    ("it is  PARIS, of course", "Paris"),
    ("the New\nYork office", "new york"),
]
TELLS += [("x12", "12"), ("-12", "12"), ("-57.25", "57.25")]
TELLS_NOT = [
    ("120", "12"),
    ("1.12", "12"),
    ("q2", "2"),
    ("12", "-12"),
    ("257.25", "57.25"),
    ("use one of these", "1"),
    ("do not divide by zero", "0"),
    ("two hundred", "2"),
    ("two hundred twenty five", "25"),
    ("two thousand", "2"),
    ("parish", "Paris"),
    ("anything", ""),
]


@pytest.mark.parametrize(("text", "answer"), TELLS)
def test_an_answer_is_found_however_it_is_written(text: str, answer: str) -> None:
    assert holds_answer(text, answer)


@pytest.mark.parametrize(("text", "answer"), TELLS_NOT)
def test_another_number_or_word_is_no_answer(text: str, answer: str) -> None:
    assert not holds_answer(text, answer)


@given(
    st.integers(-(10**6), 10**6), st.text(" .,;()ab", max_size=6), st.text(" ;,()ab", max_size=6)
)
def test_a_whole_number_between_other_signs_is_found(number: int, before: str, after: str) -> None:
    assert holds_answer(f"{before.rstrip('.ab')} {number} {after}", str(number))


@given(st.text(max_size=40), st.text(max_size=10))
def test_no_text_breaks_the_check(text: str, answer: str) -> None:
    assert holds_answer(text, answer) in (True, False)


def site(key: str, **data: str) -> ErrorSite:
    return ErrorSite(0, key, key, data)


def test_a_template_is_filled_with_the_sites_own_data_and_nothing_else() -> None:
    found = render_hint(site("unknown_tool", tool="{tools} {0}", tools="a, b", other="c"))
    assert found == "Hint: There is no tool {tools} {0}. Use one of: a, b."


def test_a_field_that_the_site_lacks_is_an_error_that_says_so() -> None:
    with pytest.raises(HintTemplateError, match=r"names the field 'tools' but .* has only tool"):
        render_hint(site("unknown_tool", tool="abacus"))


def test_an_unknown_key_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'nonsense'.*no_answer.*\[sdpo\.hints\.templates\]"):
        render_hint(site("nonsense"))


def test_a_registered_template_is_found_and_a_taken_key_is_not_lost() -> None:
    templates = HintTemplates({"a": "First {x}."})
    templates.register("b", "Second {{x}}.")
    assert render_hint(site("b"), templates=templates) == "Hint: Second {x}."
    with pytest.raises(ValueError, match="'a' already exists: pass replace=True"):
        templates.register("a", "Other.")
    templates.register("a", "Other {y}.", replace=True)
    assert render_hint(site("a", y="1"), templates=templates) == "Hint: Other 1."


def test_templates_of_a_run_do_not_change_the_built_in_ones() -> None:
    own = TEMPLATES.extended({"no_answer": "Go on.", "mine": "{why}"})
    assert render_hint(site("no_answer"), templates=own) == "Hint: Go on."
    assert render_hint(site("mine", why="so"), templates=own) == "Hint: so"
    assert render_hint(site("no_answer")) != "Hint: Go on."
    assert "mine" not in TEMPLATES


@pytest.mark.parametrize("bad", ["{x.y}", "{x[0]}", "{x!r}", "{x:>9}", "{}", "{0}", "{x", "x}"])
def test_a_placeholder_is_a_plain_field_name(bad: str) -> None:
    with pytest.raises(ValueError, match="write"):
        HintTemplates({"a": f"Text {bad}"})


def test_a_leak_is_refused_whatever_the_template() -> None:
    templates = HintTemplates({"a": "Try {x} dozens."})
    assert render_hint(site("a", x="3"), "36", templates) == "Hint: Try 3 dozens."
    with pytest.raises(HintLeak, match="the hint for 'a' holds the answer 36: reword it"):
        render_hint(site("a", x="thirty-six"), "36", templates)


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

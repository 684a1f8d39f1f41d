"""Quality filters: what each drops, in which order, and what is no duplicate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from preferences import ADD, ANSWER, LOOK, pair_of
from pydantic import TypeAdapter

from composer_mesh.configs.replay import DEFAULT_FILTERS, FilterConfig
from composer_mesh.rollouts.pair_filters import (
    Filtered,
    PairFilters,
    action_content,
    special_ratio,
    word_count,
)
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tool_calls import call_text

RECIPE: TypeAdapter[list[FilterConfig]] = TypeAdapter(list[FilterConfig])


def filters_of(*filters: dict[str, Any]) -> PairFilters:
    return PairFilters(RECIPE.validate_python(list(filters)))


def names(filtered: Filtered) -> list[str]:
    return [pair.pair_id for pair in filtered.kept]


def test_bounds_of_length_may_be_met_and_both_sides_count() -> None:
    pairs = [
        pair_of("fits", "four", "eight888"),
        pair_of("short chosen", "thr", "eight888"),
        pair_of("long rejected", "four", "nine99999"),
    ]
    filtered = filters_of({"type": "length", "min": 4, "max": 8}).keep(pairs)
    assert names(filtered) == ["fits"]
    assert filtered.dropped == {"length": 2}


def test_a_filter_of_one_side_leaves_the_other_alone() -> None:
    pairs = [pair_of("a", "short", "very much longer"), pair_of("b", "very much longer", "short")]
    chosen = {"type": "length", "min": 8, "sides": ["chosen"]}
    rejected = {"type": "length", "min": 8, "sides": ["rejected"]}
    assert names(filters_of(chosen).keep(pairs)) == ["b"]
    assert names(filters_of(rejected).keep(pairs)) == ["a"]
    filtered = filters_of(chosen, rejected).keep(pairs)
    assert names(filtered) == []
    assert filtered.dropped == {"length": 1, "length_2": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("one", 1),
        ("two  words\n", 2),
        ("東京は日本の首都です", 10),
        ("東京 and Kyoto", 4),
        ("สวัสดี", 6),
        ("привет мир", 2),
        ("안녕 세계", 2),
    ],
)
def test_words_are_counted_in_every_script(text: str, words: int) -> None:
    assert word_count(text) == words


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("", 0.0),
        ("plain text", 0.0),
        ("naïve café Ünïcödé 漢字 ١٢٣", 0.0),
        ("नमस्ते दुनिया", 0.0),
        ("cafe\u0301", 0.0),
        ("می\u200cخواهم", 0.0),
        ("a!b?", 0.5),
        ("😀😀", 1.0),
        ("\x00\x1b", 1.0),
    ],
)
def test_letters_of_every_script_are_nothing_special(text: str, ratio: float) -> None:
    assert special_ratio(text) == ratio


def test_the_marks_of_json_do_not_count_against_a_call() -> None:
    terse = '<tool_call>\n{"name":"f","arguments":{"a":[[1,2],[3,4]],"b":{"c":{}}}}\n</tool_call>'
    assert special_ratio(terse) > 0.5
    assert action_content(terse) == "f a 1 2 3 4 b c"
    noise = call_text("f", {"x": "$%&/()=?!§$%&/()=?"})
    broken = '<tool_call>\n{{{{"":::,,,\n</tool_call>'
    pairs = [pair_of("call", terse), pair_of("noise", noise), pair_of("broken", ADD, broken)]
    filtered = filters_of({"type": "special_characters"}).keep(pairs)
    assert names(filtered) == ["call"]
    assert action_content(f"So:\n{ADD}") == "So: calculator op add a 2 b 3"


def test_the_first_filter_that_fails_counts_the_pair() -> None:
    pairs = [pair_of("a", "!!", "!!")]
    length, special = {"type": "length"}, {"type": "special_characters"}
    assert filters_of(length, special).keep(pairs).dropped == {"length": 1, "special_characters": 0}
    assert filters_of(special, length).keep(pairs).dropped == {"special_characters": 1, "length": 0}


EXACT = {"type": "exact_duplicates"}


def with_call_id(pair: PreferencePair, name: str) -> PreferencePair:
    called: dict[str, Any] = {"id": name, "type": "function", "function": {"name": "f"}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    read = {"role": "tool", "tool_call_id": name, "content": "5"}
    return replace(pair, pair_id=name, messages=[*pair.messages, said, read])


def test_exact_duplicates_are_found_within_and_across_batches() -> None:
    filters = filters_of(EXACT)
    assert names(filters.keep([pair_of("a"), pair_of("b")])) == ["a"]
    assert names(filters.keep([pair_of("c"), pair_of("d", LOOK)])) == ["d"]
    assert names(filters_of(EXACT).keep([pair_of("c")])) == ["c"]


def test_a_duplicate_may_be_spelled_otherwise() -> None:
    spelled = call_text("calculator", {"b": 3.0, "a": 2, "op": "add"})
    pairs = [pair_of("a"), pair_of("b", spelled), pair_of("c", rejected="Answer: 5.0")]
    assert names(filters_of(EXACT).keep(pairs)) == ["a"]


@pytest.mark.parametrize(
    "other",
    [
        pair_of("b", asked="What is 2 plus 4?"),
        pair_of("b", chosen=LOOK),
        pair_of("b", rejected="Answer: 6"),
    ],
)
def test_another_context_or_action_is_no_exact_duplicate(other: PreferencePair) -> None:
    assert names(filters_of(EXACT).keep([pair_of("a"), other])) == ["a", "b"]


def test_ids_of_calls_make_no_other_context() -> None:
    pairs = [with_call_id(pair_of(""), name) for name in ("call_1", "call_x9")]
    assert names(filters_of(EXACT).keep(pairs)) == ["call_1"]


NEAR = {"type": "near_duplicates", "threshold": 0.9}
STORY = (
    "Ann has {} apples in a basket and buys {} more at the market, where Ben sells them. "
    "Ben also has pears, and a dog that sleeps under the table. How many apples has Ann now?"
)


def test_a_reworded_task_with_the_same_answer_is_a_near_duplicate() -> None:
    asked = STORY.format(2, 3)
    pairs = [pair_of("a", asked=asked), pair_of("b", asked=asked.replace("dog", "cat"))]
    filtered = filters_of(NEAR).keep(pairs)
    assert (names(filtered), filtered.dropped) == (["a"], {"near_duplicates": 1})
    assert names(filters_of(EXACT).keep(pairs)) == ["a", "b"]


def test_tasks_that_differ_in_numbers_only_are_not_near_duplicates() -> None:
    """One wording serves a whole data set; the action that it asks for is another each time."""
    calls = [call_text("calculator", {"op": "add", "a": n, "b": 3}) for n in range(9)]
    numbers = [f"Answer: {n + 3}" for n in range(9)]
    words = [f"Ann has {n + 3} apples." for n in range(9)]
    for chosen in (calls, numbers, words):
        pairs = [
            pair_of(str(n), text, "I can not answer.", STORY.format(n, 3))
            for n, text in enumerate(chosen)
        ]
        assert len(filters_of(NEAR).keep(pairs).kept) == 9


def test_the_same_action_in_another_task_is_no_near_duplicate() -> None:
    tasks = ["What is the value of lamp?", "Convert the value of lamp from yards to feet."]
    pairs = [pair_of(asked, LOOK, "I can not answer.", asked) for asked in tasks]
    assert names(filters_of(NEAR).keep(pairs)) == tasks


def test_pairs_that_an_earlier_process_kept_are_remembered() -> None:
    first, again = filters_of(EXACT, NEAR), filters_of(EXACT, NEAR)
    kept = first.keep([pair_of("a"), pair_of("b", LOOK)]).kept
    again.remember(kept)
    more = [pair_of("c"), pair_of("d", LOOK), pair_of("e", asked="What is the sum of 2 and 3?")]
    assert again.keep(more) == first.keep(more)


def test_the_default_recipe_keeps_ordinary_pairs() -> None:
    pairs = [pair_of("a"), pair_of("b", LOOK), pair_of("c", ANSWER, "I can not answer.")]
    filtered = PairFilters(DEFAULT_FILTERS).keep(pairs)
    assert names(filtered) == ["a", "b", "c"]
    assert list(filtered.dropped) == [of.type for of in DEFAULT_FILTERS]


def test_no_recipe_drops_nothing() -> None:
    assert filters_of().keep([pair_of("a"), pair_of("a")]) == Filtered([pair_of("a")] * 2, {})

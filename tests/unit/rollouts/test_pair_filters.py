"""Quality filters: what each drops, in which order, and what is no duplicate.

Near duplicates: similarity is Jaccard's over shingles, topics stay apart, the window slides.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preferences import ADD, ANSWER, LOOK, pair_of
from pydantic import TypeAdapter

from composer_mesh.configs.replay import DEFAULT_FILTERS, FilterConfig
from composer_mesh.rollouts.pair_filters import (
    MISSED,
    Filtered,
    NearDuplicates,
    PairFilters,
    action_content,
    index_shape,
    shingles,
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


WORDS = [
    "lamp",
    "desk",
    "bell",
    "boat",
    "fork",
    "value",
    "sum",
    "steps",
    "answer",
    "metre",
    "river",
]


def sentence(seed: int, words: int = 60) -> list[str]:
    return random.Random(seed).choices(WORDS, k=words)


def near(threshold: float = 0.9, window: int = 100, permutations: int = 128) -> NearDuplicates:
    return NearDuplicates(threshold, 5, permutations, window)


def jaccard(one: str, other: str) -> float:
    a, b = (set(shingles(text, 5).tolist()) for text in (one, other))
    return len(a & b) / len(a | b)


def test_a_text_is_seen_once_it_was_remembered() -> None:
    texts = near()
    assert not texts.seen("what is the value of the lamp?", b"")
    assert texts.seen("what is the value of the lamp?", b"")
    assert not texts.seen("how many feet are twelve yards?", b"")


def test_case_width_and_white_space_make_no_other_text() -> None:
    texts = near()
    assert not texts.seen("The value of the lamp is 12.", b"")
    assert texts.seen("the  VALUE of\nthe lamp is １２.", b"")


def test_one_text_in_two_topics_is_two() -> None:
    texts = near()
    assert not texts.seen("the same words", b"one")
    assert not texts.seen("the same words", b"other")
    assert texts.seen("the same words", b"one")


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_texts_on_either_side_of_the_threshold_are_told_apart(threshold: float) -> None:
    error = 3 * sqrt(threshold * (1 - threshold) / 512)
    wrong = {"near": 0, "far": 0}
    for seed in range(60):
        words = sentence(seed, 200)
        texts, changed = near(threshold, permutations=512), list(words)
        assert not texts.seen(" ".join(words), b"")
        for place in random.Random(seed).sample(range(200), k=seed):
            changed[place] = "x" * (place % 7 + 1)
        similar = jaccard(" ".join(words), " ".join(changed))
        seen = near(threshold, permutations=512)
        seen.seen(" ".join(words), b"")
        found = seen.seen(" ".join(changed), b"")
        wrong["near"] += similar > threshold + error and not found
        wrong["far"] += similar < threshold - error and found
    assert wrong["far"] <= 1
    assert wrong["near"] <= 2


def test_only_the_last_texts_are_remembered() -> None:
    texts, said = near(window=3), [" ".join(sentence(seed)) for seed in range(5)]
    assert not any(texts.seen(text, b"") for text in said)
    assert texts.seen(said[-3], b"")
    assert not texts.seen(said[0], b"")


def test_a_text_that_was_seen_takes_no_place_in_the_window() -> None:
    texts, said = near(window=2), [" ".join(sentence(seed)) for seed in range(2)]
    assert not any(texts.seen(text, b"") for text in said)
    assert all(texts.seen(said[1], b"") for _ in range(5))
    assert texts.seen(said[0], b"")


@given(text=st.text(max_size=60), size=st.integers(1, 80))
def test_every_text_has_shingles_and_is_near_itself(text: str, size: int) -> None:
    assert (shingles(text, size) == shingles(text, size)).all()
    texts = NearDuplicates(1.0, size, 16, 4)
    assert not texts.seen(text, b"")
    assert texts.seen(text, b"")


def test_a_shingle_is_as_long_as_it_says() -> None:
    assert len(shingles("abcdefgh", 5)) == 4
    assert set(shingles("abcdefgh", 5)) & set(shingles("xabcdex", 5))
    assert not set(shingles("abcdefgh", 5)) & set(shingles("xabcdxx", 5))


@given(threshold=st.floats(0.01, 1), permutations=st.integers(16, 1024))
def test_the_index_overlooks_few_similar_texts(threshold: float, permutations: int) -> None:
    bands, rows = index_shape(threshold, permutations)
    assert bands >= 2
    assert bands * rows <= permutations
    if rows > 1:
        assert (1 - threshold**rows) ** bands <= MISSED


@given(text=st.text("ab é\U0001f600", min_size=5, max_size=30))
def test_hashes_depend_on_the_characters_alone(text: str) -> None:
    """By Python's own integers: no seed of a process, no byte order and no overflow is in them."""
    plain, found = " ".join(text.casefold().split()), set()
    for start in range(max(1, len(plain) - 4) if plain else 0):
        value = 0
        for char in plain[start : start + 5]:
            value = (value * 0x9E3779B97F4A7C15 + ord(char)) % 2**64
        found.add((value ^ (value >> 32)) % 2**32)
    assert set(shingles(text, 5).tolist()) == found


def test_the_longest_texts_cost_no_more_than_their_length() -> None:
    texts = near()
    letters = "".join(random.Random(0).choices("abcdefghijklmnop ", k=96_000))
    began = time.process_time()
    texts.seen(letters, b"")
    texts.seen("a" * 96_000, b"")
    assert time.process_time() - began < 5

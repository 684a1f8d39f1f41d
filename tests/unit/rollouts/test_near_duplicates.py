"""Near duplicates: similarity is Jaccard's over shingles, topics stay apart, the window slides."""

from __future__ import annotations

import random
import time
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.pair_filters import MISSED, NearDuplicates, index_shape, shingles

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

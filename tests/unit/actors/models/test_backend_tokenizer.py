"""The tokenizer that skips transformers' wrapper gives the same ids and texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.actors.models.tokenizer import BackendTokenizer

TOKENIZER = build_tokenizer(["a tool returned the sum of 17 orders"] * 40, 300)


@given(st.text())
def test_texts_have_the_ids_and_ids_the_texts_of_transformers(text: str) -> None:
    fast = BackendTokenizer(TOKENIZER)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert fast.encode(text, add_special_tokens=False) == ids
    options: dict[str, Any] = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    assert fast.decode(ids, **options) == TOKENIZER.decode(ids, **options)


def test_a_folder_that_asks_for_truncation_cuts_nothing_off() -> None:
    tokenizer = build_tokenizer(["a tool returned the sum"] * 40, 300)
    tokenizer.backend_tokenizer.enable_truncation(2)
    text = "a tool returned the sum of all orders"
    assert BackendTokenizer(tokenizer).encode(text, add_special_tokens=False) == tokenizer.encode(
        text, add_special_tokens=False
    )


def test_text_is_never_cleaned_up() -> None:
    with pytest.raises(ValueError, match="not cleaned up"):
        BackendTokenizer(TOKENIZER).decode([1], clean_up_tokenization_spaces=True)

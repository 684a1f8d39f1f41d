"""The front page is short, and its Python runs."""

from __future__ import annotations

import random
from typing import Any

from guides import ROOT, Guide

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 1100


def test_it_has_few_words() -> None:
    assert len(TEXT.split()) <= MOST_WORDS


def test_its_blocks_run() -> None:
    names: dict[str, Any] = {}
    for block in Guide(TEXT).blocks("python"):
        exec(block, names)
    row = names["Sums"]().generate(random.Random(0))
    assert row["question"].startswith("What is ")
    assert callable(names["follow"])

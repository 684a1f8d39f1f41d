"""The sampled tokens of a turn as text, each with a colour by one of its figures.

logprob     how unlikely the token was when it was sampled
version     by which policy version, compared with the newest of the rollout
advantage   of its rollout, or of its turn where turns have their own
divergence  between the policy and the SDPO teacher, which saw a hint, in turns that were distilled
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.traces.whole import TOKENIZER_FILE

Colouring = Literal["none", "logprob", "version", "advantage", "divergence"]
COLOURINGS: tuple[Colouring, ...] = ("none", "logprob", "version", "advantage", "divergence")
BINS = 8
UNLIKELIEST = 6.0
"""Nats at which the colour of an unlikely token is strongest."""
LARGEST_ADVANTAGE = 2.0
LARGEST_DIVERGENCE = math.log(2)
"""Nats at which the colour is strongest: the most that a JSD with equal weights can be."""
MOST_TOKENS = 4000
TOKENIZERS_KEPT = 3


@dataclass(frozen=True, slots=True)
class Token:
    """A token to show: its text, the class of its colour, and its figures in words."""

    text: str
    colour: str
    description: str


def tokenizer_of(folder: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a folder, kept while its file is as it was; None without one."""
    if folder is None:
        return None
    file = folder / TOKENIZER_FILE
    return _tokenizer(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=TOKENIZERS_KEPT)
def _tokenizer(file: Path, _changed_ns: int) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def tokens_of(
    turn: Turn,
    colouring: Colouring,
    tokenizer: Tokenizer | None,
    newest: int,
    advantage: float | None,
    divergences: Sequence[float] = (),
) -> list[Token]:
    """Return the first MOST_TOKENS sampled tokens of a turn; without a tokenizer their ids."""
    found = []
    figures = zip(turn.action_ids, turn.logprobs, turn.versions, strict=True)
    for place, (token, logprob, version) in enumerate(list(figures)[:MOST_TOKENS]):
        description = f"log-prob {logprob:.3f} · version {version} · id {token}"
        if advantage is not None:
            description += f" · advantage {advantage:+.3f}"
        divergence = divergences[place] if place < len(divergences) else None
        if divergence is not None:
            description += f" · divergence {divergence:.3f}"
        colour = _colour(colouring, logprob, newest - version, advantage, divergence)
        found.append(Token(_text(token, tokenizer), colour, description))
    return found


def advantage_of(
    trace: Trace, turn: int, advantages: dict[str, float | Sequence[float]]
) -> float | None:
    """Return the advantage of a turn of a rollout; None where it is unknown."""
    found = advantages.get(trace.trace_id)
    if found is None or isinstance(found, int | float):
        return found
    return float(found[turn]) if turn < len(found) else None


def _colour(
    colouring: Colouring,
    logprob: float,
    age: int,
    advantage: float | None,
    divergence: float | None,
) -> str:
    if colouring == "logprob":
        return f"u{_bin(-logprob / UNLIKELIEST)}"
    if colouring == "version":
        return f"v{min(age, BINS)}"
    if colouring == "advantage" and advantage is not None:
        side = "p" if advantage > 0 else "n"
        return f"{side}{_bin(abs(advantage) / LARGEST_ADVANTAGE)}"
    if colouring == "divergence" and divergence is not None and math.isfinite(divergence):
        side = "p" if divergence < 0 else "u"
        return f"{side}{_bin(abs(divergence) / LARGEST_DIVERGENCE)}"
    return "u0"


def _bin(share: float) -> int:
    return min(BINS, max(0, round(share * BINS)))


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"·{token}"
    text = tokenizer.decode([token], skip_special_tokens=False) or f"·{token}"
    return "".join("↵\n" if part == "\n" else plain_text(part) for part in _by_lines(text))


def _by_lines(text: str) -> list[str]:
    return [part for line in text.splitlines(keepends=True) for part in _with_end(line)]


def _with_end(line: str) -> list[str]:
    return [line[:-1], "\n"] if line.endswith("\n") else [line]

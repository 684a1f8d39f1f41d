"""Ends a sampled continuation at a text, for engines that stop at token ids only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from composer_mesh.rollouts.generation import GenerationResult


def tokens_to_stop(
    stops: Sequence[str], ids: list[int], text_of: Callable[[list[int]], str]
) -> int | None:
    """Return how many tokens, at least 1, complete the first of the `stops`; None without one.

    More tokens only add text, except for the U+FFFD of half a character: a stop text with U+FFFD is
    found after any number of tokens that shows it. Few beginnings are decoded.
    """

    def has(count: int) -> bool:
        text = text_of(ids[:count])
        return any(stop in text for stop in stops)

    if not stops or not ids or not has(len(ids)):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has(middle) else (middle + 1, high)
    return low


def cut_at(
    stop: Sequence[str], result: GenerationResult, text_of: Callable[[list[int]], str]
) -> GenerationResult:
    """Return the longest beginning of a result whose text has none of the `stop` texts."""
    count = tokens_to_stop(stop, result.token_ids, text_of)
    if count is None:
        return result
    kept = count - 1
    return replace(
        result,
        token_ids=result.token_ids[:kept],
        logprobs=result.logprobs[:kept],
        versions=result.versions[:kept],
        stop_reason="length",
    )

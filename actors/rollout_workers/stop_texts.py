"""Ends a sampled continuation before a text, for engines that stop at token ids only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from composer_mesh.rollouts.generation import GenerationResult


def cut_at(
    stop: Sequence[str], result: GenerationResult, text_of: Callable[[list[int]], str]
) -> GenerationResult:
    """Return the longest beginning of a result whose text has none of the `stop` texts."""
    ids = result.token_ids
    if not stop or not _found(stop, text_of(ids)):
        return result
    kept = next(n for n in range(len(ids) + 1) if _found(stop, text_of(ids[: n + 1])))
    return replace(
        result,
        token_ids=ids[:kept],
        logprobs=result.logprobs[:kept],
        versions=result.versions[:kept],
        stop_reason="length",
    )


def _found(stop: Sequence[str], text: str) -> bool:
    return any(one in text for one in stop)

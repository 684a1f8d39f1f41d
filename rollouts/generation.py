"""Request and result types of a generator: token ids in, token ids out.

Any engine that serves these types can be a generator.

Ends a sampled continuation at a text, for engines that stop at token ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from composer_mesh.rollouts.traces import ExpertChoices, StopReason, pickled_by_position


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens may be sampled, in this order; as it is here, all of them.

    Those with at least `min_p` times the largest probability; of these the `top_k` most probable
    (0 is all); of these the most probable whose probabilities reach `top_p` together.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


WHOLE = Truncation()


@pickled_by_position
@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One continuation to sample. `temperature` 0 is greedy; `seed` makes the sample repeatable.

    `prompt_ids` of long episodes are an `array` of int32: it is sent as it lies in memory, where a
    list is packed number by number.

    The log-probs of its result are those of the distribution that is sampled from, after
    `temperature` and `truncation`. `deadline_s` limits the seconds from its admission to the engine
    to its last token; what it waits before in the engine's queue does not count.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: list[int]
    deadline_s: float | None = None
    truncation: Truncation = WHOLE
    experts_from: int | None = None
    """Position from which on the result tells the experts that were chosen; None for none."""


@pickled_by_position
@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Sampled ids with a log-prob (nats) and a policy version for each id.

    The stop token, if sampled, is the last id. For `cached_tokens` of the prompt's tokens keys and
    values were reused, the others were computed. `experts` are those of the positions from the
    request's `experts_from` to the last but one, whose keys are computed.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason
    cached_tokens: int = 0
    experts: ExpertChoices | None = None


def tokens_of(prompt: int, result: GenerationResult) -> Counter[str]:
    """Return the tokens of an answer to a prompt: "prompt", "cached" of these, and "sampled"."""
    sampled = len(result.token_ids)
    return Counter(prompt=prompt, cached=result.cached_tokens, sampled=sampled)


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

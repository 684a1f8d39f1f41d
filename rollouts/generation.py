"""Request and result types of a generator: token ids in, token ids out.

Any engine that serves these types can be a generator.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.packed_numbers import packed_ids, packed_logprobs
from composer_mesh.rollouts.traces import StopReason


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One continuation to sample. `temperature` 0 is greedy; `seed` makes the sample repeatable.

    `deadline_s` limits the seconds from its admission to the engine to its last token; what it
    waits before in the engine's queue does not count.
    """

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: list[int]
    deadline_s: float | None = None

    def __reduce__(self) -> Any:
        """Return what pickle needs: a long prompt takes a third of the time of a list."""
        sampling = (self.max_new_tokens, self.temperature, self.seed, self.stop_ids)
        prompt = packed_ids(self.prompt_ids)
        return _request, (self.request_id, prompt, *sampling, self.deadline_s)


def _request(request_id: str, prompt: array[int], *others: Any) -> GenerationRequest:
    return GenerationRequest(request_id, prompt.tolist(), *others)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Sampled ids with a log-prob (nats) and a policy version for each id.

    The stop token, if sampled, is the last id. For `cached_tokens` of the prompt's tokens keys and
    values were reused, the others were computed.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason
    cached_tokens: int = 0

    def __reduce__(self) -> Any:
        """Return what pickle needs, in a fraction of the time that it takes for a dataclass."""
        ids, versions = packed_ids(self.token_ids), packed_ids(self.versions)
        numbers = (ids, packed_logprobs(self.logprobs), versions)
        return _result, (self.request_id, *numbers, self.stop_reason, self.cached_tokens)


def _result(
    request_id: str,
    ids: array[int],
    logprobs: array[float],
    versions: array[int],
    stop_reason: StopReason,
    cached_tokens: int,
) -> GenerationResult:
    lists = (ids.tolist(), logprobs.tolist(), versions.tolist())
    return GenerationResult(request_id, *lists, stop_reason, cached_tokens)

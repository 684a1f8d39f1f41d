"""Results as clients read them: protobuf of training and sampling, JSON of everything else.

Axes: T tokens of a sequence, K ids at one position.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from composer_mesh.mesh.failures import cause_of
from composer_mesh.plugins.tinker.models.messages import Scores, TrainResult
from composer_mesh.plugins.tinker.server.protobuf_messages import (
    DTYPE_FLOAT32,
    LENGTH,
    STOP,
    ForwardBackwardOutput,
    SampleResponse,
)
from composer_mesh.rollouts.generation import GenerationResult

NO_LOGPROB = -99999.0
"""What SDKs read as a position without most probable ids."""

MediaType = Literal["json", "protobuf"]
ErrorCategory = Literal["user", "server"]


@dataclass(frozen=True)
class Result:
    """The answer to an operation: its content, and whether it is an error."""

    content: bytes
    media: MediaType = "json"
    failed: bool = False


def json_result(**values: Any) -> Result:
    """Return a result as an object of JSON."""
    return Result(json.dumps(values, allow_nan=False).encode())


def failure(text: str, category: ErrorCategory) -> Result:
    """Return the result of an operation that could not be executed."""
    content = json.dumps({"error": text, "category": category}).encode()
    return Result(content, failed=True)


def fault(error: Exception) -> Result:
    """Return the result of an operation whose execution raised an error."""
    return failure(f"its execution failed: {cause_of(error)}", "server")


def given_up(attempts: int, reason: str) -> Result:
    """Return the result of an operation with which processes were lost again and again."""
    text = f"it was given up after {attempts} attempts, in each of which a process was lost"
    return failure(f"{text}: {reason}", "server")


def training_result(found: TrainResult) -> Result:
    """Return log-probs and metrics; sequences of equal K are one record."""
    output = ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, arrays in groupby(found.logprobs, key=lambda one: one.shape[1:]):
        _add_record(output, list(arrays), trailing)
    for name, value in found.metrics.items():
        output.metrics[name] = value
    return Result(output.SerializeToString(deterministic=True), "protobuf")


def _add_record(output: Any, arrays: list[NDArray[np.float32]], trailing: Sequence[int]) -> None:
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
    field = record.fields["logprobs"]
    field.data = b"".join(_floats(one) for one in arrays)
    field.offsets = np.cumsum([0, *(4 * one.size for one in arrays)]).astype("<i8").tobytes()
    field.dtype = DTYPE_FLOAT32
    field.trailing_shape.extend(trailing)


def sample_result(
    sequences: Sequence[GenerationResult],
    sampled_top: Sequence[Scores | None],
    prompt: Scores | None,
    own_logprobs: bool,
) -> Result:
    """Return samples, and what was requested of the prompt; position 0 has no score (NaN)."""
    response = SampleResponse()
    for sequence, top in zip(sequences, sampled_top, strict=True):
        added = response.sequences.add(
            stop_reason=STOP if sequence.stop_reason == "stop" else LENGTH,
            tokens=np.asarray(sequence.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
        if top is not None and top.top_ids is not None and len(sequence.token_ids):
            _add_top(added.topk_sampled_logprobs, top, len(sequence.token_ids), 0)
    if sequences:
        response.prompt_cache_hit_tokens = sequences[0].cached_tokens
    if prompt is not None:
        if own_logprobs:
            response.prompt_logprobs = _floats(np.concatenate([[np.nan], prompt.logprobs]))
        if prompt.top_ids is not None:
            _add_top(response.topk_prompt_logprobs, prompt, len(prompt.top_ids), 1)
        if prompt.target_logprobs is not None:
            tensor = response.target_prompt_logprobs
            tensor.dense, tensor.dtype = _floats(prompt.target_logprobs), DTYPE_FLOAT32
            tensor.shape.extend(prompt.target_logprobs.shape)
    return Result(response.SerializeToString(deterministic=True), "protobuf")


def _add_top(message: Any, scores: Scores, last: int, empty: int) -> None:
    """Add the most probable ids of the `last` positions, after `empty` ones without any."""
    assert scores.top_ids is not None
    assert scores.top_logprobs is not None
    ids, logprobs = scores.top_ids[-last:], scores.top_logprobs[-last:]
    blank = (empty, ids.shape[1])
    message.token_ids = np.concatenate([np.zeros(blank, "<i4"), ids.astype("<i4")]).tobytes()
    message.logprobs = _floats(np.concatenate([np.full(blank, NO_LOGPROB), logprobs]))
    message.k, message.length = ids.shape[1], len(ids) + empty


def _floats(values: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()


def try_again(request_id: str, state: str) -> Mapping[str, str]:
    """Return the answer to a client whose operation is not done yet."""
    return {"type": "try_again", "request_id": request_id, "queue_state": state}


MOST_BYTES, MOST = 64 * 2**20, 100_000


class RecentAnswers:
    """Answers by request and client, of at most `MOST_BYTES`; the oldest are dropped."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[str, Result]] = OrderedDict()
        self._bytes = 0

    def add(self, request_id: str, client: str, answer: Result) -> None:
        """Hold an answer."""
        if request_id in self._held:
            return
        self._held[request_id] = (client, answer)
        self._bytes += len(answer.content)
        while self._bytes > MOST_BYTES or len(self._held) > MOST:
            _, (_, oldest) = self._held.popitem(last=False)
            self._bytes -= len(oldest.content)

    def of(self, client: str, request_id: str) -> Result | None:
        """Return a client's answer, if it is held."""
        held = self._held.get(request_id)
        return None if held is None or held[0] != client else held[1]

    def clear(self) -> None:
        """Forget all answers."""
        self._held.clear()
        self._bytes = 0

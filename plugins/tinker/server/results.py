"""Results as clients read them: protobuf of training and sampling, JSON of everything else.

The protobuf messages of the Tinker protocol that this server reads and writes have the numbers and
types that SDKs 0.25.0 to 0.38.0 send and expect (`tinker_public` in their `proto` folder); fields
that this server ignores are left out. Built at import, without generated code, in a pool of their
own.

Axes: T tokens of a sequence, K ids at one position.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from composer_mesh.mesh.failures import cause_of
from composer_mesh.plugins.tinker.models.messages import Scores, TrainResult
from composer_mesh.rollouts.generation import GenerationResult

PACKAGE = "tinker_public"

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "enum": _FIELD.TYPE_INT32,  # the same on the wire, and unknown values stay
}

DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32 = 1, 2, 3
STOP, LENGTH = 0, 1

# Each line: number, name, type; "*" repeated, "?" with presence, "{}" a map from text.
_MESSAGES = {
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense bytes ?; 2 sparse_csr SparseCsr; 3 dtype enum; 4 shape int64 *",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes",
    "DmelChunk": "1 dmel bytes",
    "Chunk": "1 encoded_text EncodedTextChunk; 2 image ImageChunk; 3 dmel DmelChunk",
    "Datum": "1 model_input Chunk *; 2 loss_fn_inputs Tensor {}",
    "LossConfigValue": "1 number double ?; 2 text string ?",
    "ForwardBackwardRequest": (
        "1 model_id string; 2 seq_id int32; 3 data Datum *; 4 loss_fn string; "
        "5 loss_fn_config double {}; 6 forward_only bool; 7 loss_fn_config_v2 LossConfigValue {}"
    ),
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype enum; 4 trailing_shape int64 *",
    "ArrayRecord": "1 type_tag string; 2 fields BatchedTensor {}; 3 num_datums int64",
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string; 2 loss_fn_outputs ArrayRecord *; 3 metrics double {}"
    ),
    "TopkLogprobs": "1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32",
    "SampledSequence": (
        "1 stop_reason enum; 2 tokens bytes; 3 logprobs bytes ?; "
        "4 topk_sampled_logprobs TopkLogprobs"
    ),
    "SampleResponse": (
        "1 sequences SampledSequence *; 2 prompt_logprobs bytes ?; "
        "3 topk_prompt_logprobs TopkLogprobs; 4 prompt_cache_hit_tokens int32; "
        "5 target_prompt_logprobs Tensor"
    ),
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="composer_mesh/tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines.split("; "):
            _add(message, *line.split())
    return file


def _add(message: Any, number: str, name: str, kind: str, mark: str = "") -> None:
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if mark == "{}":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, "1", "key", "string")
        _add(entry, "2", "value", kind)
        kind, mark = f"{message.name}.{entry.name}", "*"
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if mark == "*":
        field.label = _FIELD.LABEL_REPEATED
    if mark == "?":
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]

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

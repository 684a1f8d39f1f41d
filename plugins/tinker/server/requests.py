"""The JSON requests of the Tinker protocol, checked; unknown keys of newer SDKs are ignored.

`canonical` gives the bytes that the log keeps, and `payload_of` reads them again.
`check_sample` checks what depends on the model and on the limits of a server.

Of operations that wait, only small bodies stay in memory, up to a sum; `Payloads` reads the others
from the log when they are executed. `call_of` makes the call of a trainer from a payload.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_mesh.actors.sqlite_file import GroupCommit
from composer_mesh.configs.base import Temperature, TopP
from composer_mesh.configs.serve import ServeConfig
from composer_mesh.configs.validation import first_error, validated_json
from composer_mesh.plugins.tinker.models.messages import AdamParams, TrainCall
from composer_mesh.plugins.tinker.server import operation_log as log
from composer_mesh.plugins.tinker.server.records import Kind, Operation
from composer_mesh.plugins.tinker.server.training_data import (
    DataLimits,
    check_tokens,
    read_training_request,
)
from composer_mesh.services.web.errors import RequestRefused, bad

Name = Annotated[str, Field(max_length=500)]
Seq = Annotated[int, Field(ge=0, le=2**62)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
MOST_METADATA = 16_384


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Return metadata; raise ValueError for what a registry does not keep in memory."""
    if (size := len(json.dumps(values, allow_nan=False))) > MOST_METADATA:
        raise ValueError(f"it has {size:,} bytes of JSON, of at most {MOST_METADATA:,}: shorten it")
    return values


Metadata = Annotated[dict[str, Any], Field(max_length=100), AfterValidator(_short)]
MOST_TOKENS = 10_000_000
MOST_SHOWN = 10_000
"""Bytes of the longest body of which an error shows the value: the value may be the whole body."""


class ClientRequest(BaseModel):
    """A request of a client."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, str_max_length=10_000
    )

    def canonical(self) -> bytes:
        """Return bytes that are equal for equal requests."""
        return self.model_dump_json().encode()

    def identity(self) -> bytes | None:
        """Return bytes that are equal where the client repeats a request; None for `canonical`."""
        return None


Request = TypeVar("Request", bound=ClientRequest)


def parsed(kind: type[Request], body: bytes) -> Request:
    """Read a request; raises `RequestRefused` with the first thing that is wrong."""
    try:
        return validated_json(kind, body)
    except ValidationError as error:
        shown = len(body) <= MOST_SHOWN
        first = first_error(error, with_input=shown)
        where = ".".join(map(str, first["loc"]))[:200] or "the body"
        given = f" is {repr(first['input'])[:80]}" if shown else ""
        raise bad(f"{where}{given}: {first['msg'][:300]}") from None


class OfSession(ClientRequest):
    session_id: Name


class OfModel(ClientRequest):
    model_id: Name


class OfRequest(ClientRequest):
    request_id: Name


class LoraSettings(ClientRequest):
    rank: Annotated[int, Field(ge=1, le=4096)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @model_validator(mode="after")
    def _trains_something(self) -> LoraSettings:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError(
                "train_unembed, train_mlp and train_attn are all false: set one to true"
            )
        return self


class CreateModel(ClientRequest):
    session_id: Name
    model_seq_id: Seq
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: LoraSettings | None = None
    optimizer_config: Metadata | None = None


class AdamSettings(ClientRequest):
    learning_rate: Annotated[float, Field(ge=0, le=1e6)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, le=1e30)] = 0.0


class OptimStep(ClientRequest):
    model_id: Name
    seq_id: Seq | None = None
    adam_params: AdamSettings


class SaveWeights(ClientRequest):
    model_id: Name
    path: Name | None = None
    seq_id: Seq | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=315_360_000)] | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Seq | None = None
    kind: Annotated[str, Field(pattern="^(snapshot|inflight)$")] = "snapshot"

    def identity(self) -> bytes:
        """Leave out the sampler's number, which the SDK draws anew when it repeats a request."""
        return self.model_dump_json(exclude={"sampling_session_seq_id"}).encode()


class LoadWeights(ClientRequest):
    path: Name
    optimizer: bool
    model_id: Name | None = None
    seq_id: Seq | None = None
    session_id: Name | None = None
    model_seq_id: Seq | None = None
    user_metadata: Metadata | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> LoadWeights:
        if self.model_id is None and (self.session_id is None or self.model_seq_id is None):
            raise ValueError("there is no model_id: send it, or session_id and model_seq_id")
        return self


class CreateSampler(ClientRequest):
    session_id: Name
    sampling_session_seq_id: Seq
    base_model: Name | None = None
    model_path: Name | None = None


class TextChunk(ClientRequest):
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=MOST_TOKENS)
    ]
    type: Annotated[str, Field(pattern="^encoded_text$")] = "encoded_text"


class Prompt(ClientRequest):
    chunks: Annotated[list[TextChunk], Field(max_length=10_000)]

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingSettings(ClientRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[int] | list[str], Field(max_length=64)] | None = None
    temperature: Temperature = 1.0
    top_k: TopK = -1
    top_p: TopP = 1.0

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which a sample ends."""
        given = self.stop if isinstance(self.stop, list) else []
        return [one for one in given if isinstance(one, int)]

    @property
    def stop_texts(self) -> list[str]:
        """Texts before which a sample ends."""
        given: Sequence[int | str] = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [one for one in given if isinstance(one, str)]


class IntTensor(ClientRequest):
    data: Annotated[list[Annotated[int, Field(ge=-1, le=2**31 - 1)]], Field(max_length=MOST_TOKENS)]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=2)] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleRequest(ClientRequest):
    prompt: Prompt
    sampling_params: SamplingSettings
    num_samples: Annotated[int, Field(ge=1)] = 1
    sampling_session_id: Name | None = None
    base_model: Name | None = None
    model_path: Name | None = None
    seq_id: Seq | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: IntTensor | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None


class WeightsInfo(ClientRequest):
    tinker_path: Name


class TimeToLive(ClientRequest):
    ttl_seconds: Annotated[int, Field(ge=1, le=315_360_000)] | None = None


def check_sample(request: SampleRequest, data: DataLimits, limits: ServeConfig) -> None:
    """Raise `RequestRefused` for what cannot be sampled or scored."""
    ids = np.asarray(request.prompt.ids, np.int64)
    check_tokens(ids, "prompt", data.vocabulary, data.context - 1)
    most = request.sampling_params.max_tokens
    if most is not None and len(ids) + most > data.context:
        raise bad(
            f"the prompt has {len(ids)} tokens and max_tokens is {most}, but the context "
            f"{data.context}: lower max_tokens"
        )
    if request.num_samples > limits.max_samples:
        raise bad(f"num_samples is {request.num_samples}: ask for at most {limits.max_samples}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(request, name) > limits.max_top_k:
            raise bad(f"{name} is {getattr(request, name)}: ask for at most {limits.max_top_k}")
    if request.prompt_alt_tokens_k:
        raise bad("prompt_alt_tokens_k is not served: ask for topk_prompt_logprobs")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and last < len(ids)):
        raise bad(
            f"prompt_logprobs_last_n is {last}: ask for prompt_logprobs too, and for at most "
            f"{len(ids) - 1}"
        )
    _check_targets(request, len(ids), data, limits)
    stops = (*request.sampling_params.stop_ids,)
    if any(not 0 <= one < data.vocabulary for one in stops):
        raise bad(f"stop has ids beyond {data.vocabulary - 1}: correct them")


def _check_targets(
    request: SampleRequest, tokens: int, data: DataLimits, limits: ServeConfig
) -> None:
    targets = request.target_prompt_logprobs
    if targets is None:
        return
    wide = max((targets.shape or [0])[1:], default=0)
    if wide > limits.max_top_k:
        raise bad(
            f"target_prompt_logprobs has {wide} ids a position: ask for at most {limits.max_top_k}"
        )
    found = target_ids(targets, tokens)
    if found.size and not (found.min() >= -1 and found.max() < data.vocabulary):
        raise bad(f"target_prompt_logprobs has ids beyond {data.vocabulary - 1}: correct them")


def target_ids(tensor: IntTensor, tokens: int) -> NDArray[np.int64]:
    """The ids [T - 1, K] to score; -1 where a sparse tensor has none. Raises `RequestRefused`."""
    if tensor.shape is None or len(tensor.shape) != 2 or tensor.shape[0] != tokens - 1:
        raise _unfit(f"shape {tensor.shape}", tokens)
    if tensor.sparse_crow_indices is None:
        if len(tensor.data) != tensor.shape[0] * tensor.shape[1]:
            raise _unfit(f"{len(tensor.data)} values of shape {tensor.shape}", tokens)
        return np.asarray(tensor.data, np.int64).reshape(tensor.shape)
    rows, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices or []
    found = np.full(tensor.shape, -1, np.int64)
    ordered = all(one <= other for one, other in pairwise(rows))
    fits = len(rows) == tensor.shape[0] + 1 and rows[0] == 0 and rows[-1] == len(tensor.data)
    inside = all(0 <= one < tensor.shape[1] for one in columns)
    if not (ordered and fits and inside and len(columns) == len(tensor.data)):
        raise _unfit("a sparse form that does not fit itself", tokens)
    found[np.repeat(np.arange(tensor.shape[0]), np.diff(rows)), columns] = tensor.data
    return found


def _unfit(what: str, tokens: int) -> RequestRefused:
    return RequestRefused(
        400, f"target_prompt_logprobs has {what}: send ids of shape [{tokens - 1}, K], -1 for none"
    )


CHANGES: dict[str, type[ClientRequest]] = {
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveForSampler,
    "load_weights": LoadWeights,
}
"""Requests that are executed in the order of their model's, by kind."""
LARGEST_HELD, MOST_HELD = 256 * 1024, 32 * 2**20
"""Bytes of one body, and of all bodies, that are held in memory while their operations wait."""


def payload_of(kind: Kind, body: bytes, limits: DataLimits) -> Any:
    """Return the request in a body that was accepted; raises `Refused`."""
    if kind in ("forward", "forward_backward"):
        return read_training_request(body, limits)
    return parsed(CHANGES.get(kind, SampleRequest), body)


class Payloads:
    """The decoded bodies of the operations of one server."""

    def __init__(self, commits: GroupCommit, limits: DataLimits) -> None:
        self._commits, self._limits = commits, limits
        self.held = 0
        """Bytes of bodies that are held for operations that wait."""

    def hold(self, operation: Operation, payload: Any) -> None:
        """Keep the payload of an operation that begins to wait, where it may be in memory."""
        if operation.size <= min(LARGEST_HELD, MOST_HELD - self.held):
            operation.payload, operation.held = payload, operation.size
            self.held += operation.held

    def release(self, operation: Operation) -> None:
        """Free the payload of an operation that is answered."""
        self.held -= operation.held
        operation.payload, operation.held = None, 0

    async def read(self, operation: Operation) -> Any:
        """Return the payload of an operation; one from the log raises what is wrong with it."""
        if operation.payload is None:
            body = await self._commits.run(partial(log.body_of, number=operation.number))
            kind = operation.request.kind
            operation.payload = await asyncio.to_thread(payload_of, kind, body, self._limits)
        return operation.payload

    def executed(self, operation: Operation) -> None:
        """Drop the payload of an operation that was executed, unless it is held until then."""
        if not operation.held:
            operation.payload = None


def call_of(
    kind: Kind, model: str, payload: Any, position: int, path: str = "", optimizer: bool = False
) -> TrainCall:
    """Return the call for an operation; `path` is the file that it reads or writes."""
    if kind == "forward" or kind == "forward_backward":
        options, data = payload.options, payload.data
        return TrainCall(model, position, kind, data, payload.loss, options)
    if kind == "optim_step":
        adam = AdamParams(**payload.adam_params.model_dump())
        return TrainCall(model, position, "optim_step", adam=adam)
    if kind == "load_weights":
        return TrainCall(model, position, "load_weights", path=path, optimizer=optimizer)
    return TrainCall(model, position, "save", path=path, optimizer=kind == "save_weights")

"""Reads the data of `forward` and `forward_backward` from its protobuf form, and checks all of it.

Nothing is allocated that the bytes of a request do not account for, but for padding of at most
`max_top_k` numbers a token.

Axes: T tokens of a sequence, K targets of a token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES, ClientLoss, side_of
from composer_mesh.plugins.tinker.models.messages import Datum
from composer_mesh.plugins.tinker.server.results import (
    DTYPE_FLOAT32,
    DTYPE_INT32,
    DTYPE_INT64,
    ForwardBackwardRequest,
)
from composer_mesh.services.web.errors import bad

TARGETS = "target_tokens"
_DTYPES = {DTYPE_FLOAT32: np.float32, DTYPE_INT64: np.int64, DTYPE_INT32: np.int32}


@dataclass(frozen=True)
class DataLimits:
    """Bounds of one request's data, from the model and the config."""

    vocabulary: int
    context: int
    max_data: int
    max_top_k: int


@dataclass(frozen=True, eq=False)
class TrainingRequest:
    """A decoded request; `canonical` are bytes that are equal for equal requests."""

    model_id: str
    seq_id: int
    forward_only: bool
    loss: str
    options: Mapping[str, float]
    data: tuple[Datum, ...]
    canonical: bytes

    @property
    def tokens(self) -> int:
        """Number of all tokens."""
        return sum(len(one.tokens) for one in self.data)


def read_training_request(body: bytes, limits: DataLimits) -> TrainingRequest:
    """Decode and check a request; raises `Refused`."""
    try:
        message = ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise bad("the body is not a ForwardBackwardRequest of protobuf: send one") from None
    loss = CLIENT_LOSSES.get(message.loss_fn)
    if loss is None:
        raise bad(
            f"loss_fn is {message.loss_fn[:40]!r}: choose {', '.join(sorted(CLIENT_LOSSES))}, "
            "or compute it with forward_backward_custom"
        )
    if not 1 <= len(message.data) <= limits.max_data:
        raise bad(f"data has {len(message.data)} sequences: send 1 to {limits.max_data}")
    data = tuple(
        _datum(one, f"data[{n}]", message.loss_fn, loss, limits)
        for n, one in enumerate(message.data)
    )
    if loss.has_pairs:
        _check_pairs(data)
    return TrainingRequest(
        message.model_id,
        message.seq_id,
        message.forward_only,
        message.loss_fn,
        _options(message, loss),
        data,
        message.SerializeToString(deterministic=True),
    )


def _check_pairs(data: Sequence[Datum]) -> None:
    """Raise `Refused` unless each preferred answer is followed by the rejected one."""
    sides = []
    for number, datum in enumerate(data):
        try:
            sides.append(side_of(datum.inputs["preference"]))
        except ValueError as error:
            raise bad(f"data[{number}]: {error}") from None
    for number, (side, after) in enumerate(zip(sides, [*sides[1:], 0], strict=True)):
        if (side > 0) != (after < 0) or (number == 0 and side < 0):
            raise bad(
                f"data[{number}] is not a pair with data[{number + 1}]: send the sequence whose "
                "preference is above 0, then the one whose preference is below, in one request"
            )


def _options(message: Any, loss: ClientLoss) -> dict[str, float]:
    found: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.HasField("text"):
            raise bad(f"loss_fn_config[{name[:40]!r}] is text: send a number")
        found[name] = value.number
    for name, value in found.items():
        if name not in loss.options:
            known = ", ".join(sorted(loss.options)) or "none"
            raise bad(
                f"{message.loss_fn} has no option {name[:40]!r}: leave it out; known are {known}"
            )
        if not math.isfinite(value):
            raise bad(f"loss_fn_config[{name!r}] is {value}: send a finite number")
    return found


def _datum(message: Any, where: str, name: str, loss: ClientLoss, limits: DataLimits) -> Datum:
    tokens = _tokens(message.model_input, where, limits)
    known = {TARGETS, *loss.required, *loss.optional}
    given = set(message.loss_fn_inputs)
    if missing := {TARGETS, *loss.required} - given:
        raise bad(f"{where}.loss_fn_inputs lacks {min(missing)!r}, which {name} needs: add it")
    if further := given - known:
        raise bad(
            f"{where}.loss_fn_inputs has {min(further)[:40]!r}, which {name} does not read: leave "
            "it out"
        )
    inputs = {
        key: _array(message.loss_fn_inputs[key], f"{where}.loss_fn_inputs[{key!r}]", limits)
        for key in sorted(given)
    }
    targets = inputs[TARGETS]
    if targets.ndim == 2 and not loss.several_targets:
        raise bad(f"{where} has targets [T, K], which {name} does not take: send [T]")
    for key, values in inputs.items():
        shape = targets.shape if key == "weights" else (len(tokens), *targets.shape[1:])
        if values.shape != shape or len(values) != len(tokens):
            raise bad(
                f"{where}.loss_fn_inputs[{key!r}] has shape {list(values.shape)}, but the sequence "
                f"{len(tokens)} tokens and its targets {list(targets.shape)}: send one for each"
            )
    _check_targets(targets, where, limits)
    for key, values in inputs.items():
        if key != TARGETS:
            if not np.isfinite(values).all():
                name = f"{where}.loss_fn_inputs[{key!r}]"
                raise bad(f"{name} has values that are not finite: send finite ones")
            inputs[key] = values.astype(np.float32)
    inputs[TARGETS] = targets.astype(np.int64)
    return Datum(tokens, inputs)


def _check_targets(targets: NDArray[Any], where: str, limits: DataLimits) -> None:
    if targets.dtype.kind != "i":
        raise bad(f"{where}.loss_fn_inputs['{TARGETS}'] is of floats: send int64")
    if targets.size and not (targets.min() >= 0 and targets.max() < limits.vocabulary):
        raise bad(
            f"{where} has targets from {targets.min()} to {targets.max()}: send ids from 0 to "
            f"{limits.vocabulary - 1}"
        )


def _tokens(chunks: Any, where: str, limits: DataLimits) -> NDArray[np.int64]:
    parts = []
    for chunk in chunks:
        others = chunk.HasField("image") or chunk.HasField("dmel")
        if others or not chunk.HasField("encoded_text"):
            raise bad(f"{where}.model_input has a chunk that is not text: send encoded text alone")
        content = chunk.encoded_text.tokens
        if len(content) % 4:
            raise bad(
                f"{where}.model_input has {len(content)} bytes of int32: send a multiple of 4"
            )
        parts.append(np.frombuffer(content, "<i4"))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    check_tokens(tokens, f"{where}.model_input", limits.vocabulary, limits.context)
    return tokens


def check_tokens(tokens: NDArray[np.int64], where: str, vocabulary: int, longest: int) -> None:
    """Raise `Refused` for too many or no tokens, or ids that the model does not have."""
    if not 1 <= len(tokens) <= longest:
        raise bad(f"{where} has {len(tokens)} tokens: send 1 to {longest}")
    if not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise bad(
            f"{where} has ids from {tokens.min()} to {tokens.max()}: send ids from 0 to "
            f"{vocabulary - 1}"
        )


def _array(message: Any, where: str, limits: DataLimits) -> NDArray[Any]:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise bad(f"{where} has the dtype {message.dtype}: send float32 or int64")
    shape = [int(size) for size in message.shape]
    sparse = message.HasField("sparse_csr")
    content = message.sparse_csr.values if sparse else message.dense
    if len(content) % np.dtype(dtype).itemsize:
        raise bad(
            f"{where} has {len(content)} bytes, which no {np.dtype(dtype).name} has: correct it"
        )
    values = np.frombuffer(content, np.dtype(dtype).newbyteorder("<"))
    shape = shape or [len(values)]
    if len(shape) > 2 or min(shape) < 0 or shape[0] > limits.context:
        raise bad(
            f"{where} has shape {shape[:4]}: send [T] or [T, K] of at most {limits.context} tokens"
        )
    if len(shape) == 2 and not 1 <= shape[1] <= limits.max_top_k:
        raise bad(f"{where} has {shape[1]} targets a token: send 1 to {limits.max_top_k}")
    if sparse:
        return _dense(message.sparse_csr, values, shape, where)
    if len(values) != math.prod(shape):
        raise bad(f"{where} has {len(values)} values for shape {shape}: send as many as it has")
    return values.reshape(shape)


def _dense(csr: Any, values: NDArray[Any], shape: list[int], where: str) -> NDArray[Any]:
    """Return a sparse matrix with zeros where it has no value."""
    if len(shape) != 2 or len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        raise bad(f"{where} is not a sparse matrix: send CSR with int64 indices and a shape [T, K]")
    rows = np.frombuffer(csr.crow_indices, "<i8")
    columns = np.frombuffer(csr.col_indices, "<i8")
    fits = len(rows) == shape[0] + 1 and len(columns) == len(values)
    ordered = bool((rows[1:] >= rows[:-1]).all())  # differences of int64 can wrap around
    if not fits or not ordered or rows[0] != 0 or rows[-1] != len(values):
        raise bad(f"{where} has row indices that do not fit its values: send CSR of {shape}")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise bad(f"{where} has column indices beyond {shape[1]} columns: correct them")
    found = np.zeros(shape, values.dtype)
    found[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return found

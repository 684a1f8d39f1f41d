"""The outer gradients and outer optimizers of DiLoCo (arXiv 2311.08105), on flat float32 arrays.

Every island computes the same round by itself, on whatever hardware. So each operation here is one
elementwise IEEE operation, whose result is the same everywhere: no fused multiply-add, no `pow`.

An outer gradient is what an island sends of its training, by every transport. In 8 or 4 bits it is
encoded in blocks of 256 values, each with a scale of its own. A value becomes the nearest of
2 * limit + 1 multiples of its block's scale, largest value / limit, so that its error is at most
half a scale. Error feedback (arXiv 1901.09847) adds what a round's rounding took away to the next
one: over many rounds only the last round's error is missing.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from composer_mesh.configs.islands import OuterAdam, OuterConfig, OuterSgd

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class OuterState:
    """The common weights after a round, and what the outer optimizer keeps, all of one length."""

    round: int
    weights: Vector
    slots: tuple[Vector, ...] = ()


class OuterOptimizer(Protocol):
    """Makes the next round's state of the mean outer gradient: old common weights minus new."""

    slots: int
    """Number of arrays that a state keeps in addition to its weights."""

    def step(self, state: OuterState, gradient: Vector) -> OuterState: ...


class Sgd:
    """SGD with momentum as torch.optim.SGD defines it, without dampening."""

    def __init__(self, config: OuterSgd) -> None:
        self._lr, self._momentum = np.float32(config.lr), np.float32(config.momentum)
        self._nesterov = config.nesterov
        self.slots = 1 if config.momentum else 0

    def step(self, state: OuterState, gradient: Vector) -> OuterState:
        if not self.slots:
            return OuterState(state.round + 1, state.weights - self._lr * gradient)
        momentum = self._momentum * state.slots[0] + gradient
        update = gradient + self._momentum * momentum if self._nesterov else momentum
        return OuterState(state.round + 1, state.weights - self._lr * update, (momentum,))


class Adam:
    """Adam with bias correction, as torch.optim.Adam defines it."""

    slots = 2

    def __init__(self, config: OuterAdam) -> None:
        self._config = config

    def step(self, state: OuterState, gradient: Vector) -> OuterState:
        config, count = self._config, state.round + 1
        first, second = np.float32(config.beta1), np.float32(config.beta2)
        mean = first * state.slots[0] + (np.float32(1) - first) * gradient
        square = second * state.slots[1] + (np.float32(1) - second) * (gradient * gradient)
        unbiased = mean / np.float32(1 - _power(config.beta1, count))
        spread: Vector = np.sqrt(square / np.float32(1 - _power(config.beta2, count)))
        update: Vector = unbiased / (spread + np.float32(config.eps))
        return OuterState(count, state.weights - np.float32(config.lr) * update, (mean, square))


def make_outer(config: OuterConfig) -> OuterOptimizer:
    """Return the configured outer optimizer."""
    return Sgd(config) if isinstance(config, OuterSgd) else Adam(config)


def first_state(weights: Vector, optimizer: OuterOptimizer) -> OuterState:
    """Return the state before the first round."""
    slots = tuple(np.zeros_like(weights) for _ in range(optimizer.slots))
    return OuterState(0, weights.copy(), slots)


def state_bytes(state: OuterState) -> bytes:
    """Return a state's arrays as little-endian bytes."""
    return b"".join(one.astype("<f4").tobytes() for one in (state.weights, *state.slots))


def state_of(round_number: int, payload: bytes, size: int, optimizer: OuterOptimizer) -> OuterState:
    """Return the state of such bytes; raises ValueError for another length or optimizer."""
    arrays = np.frombuffer(payload, "<f4").astype(np.float32)
    if arrays.size != size * (1 + optimizer.slots):
        raise ValueError(
            f"a state of {arrays.size} numbers is not one of {size} weights with "
            f"{optimizer.slots} arrays of the outer optimizer"
        )
    weights, *slots = np.split(arrays, 1 + optimizer.slots)
    return OuterState(round_number, weights.copy(), tuple(one.copy() for one in slots))


def _power(base: float, exponent: int) -> float:
    """Return a power by products alone: `pow` differs in its last bit between C libraries."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


Quantization = Literal["none", "int8", "int4"]
BLOCK = 256
LIMITS = {"int8": 127, "int4": 7}
LARGEST_VALUE = np.float32(1e9)
"""Beyond it an outer gradient is not one of training, and sums and squares would be infinite."""


@dataclass(frozen=True)
class Encoded:
    """A payload, and the values that its readers get."""

    payload: bytes
    values: Vector


def encode(values: Vector, how: Quantization) -> Encoded:
    """Encode finite values."""
    if how == "none":
        return Encoded(values.astype("<f4").tobytes(), values.copy())
    blocks = _blocks(values)
    scales = np.abs(blocks).max(axis=1) / np.float32(LIMITS[how])
    divisors = np.where(scales > 0, scales, np.float32(1))
    codes = np.rint(blocks / divisors[:, None]).clip(-LIMITS[how], LIMITS[how]).astype(np.int8)
    body = codes.tobytes() if how == "int8" else _packed(codes)
    return Encoded(scales.astype("<f4").tobytes() + body, _values(scales, codes, values.size))


def decode(payload: bytes, size: int, how: Quantization) -> Vector:
    """Return the values of a payload; raises ValueError for a wrong length or values like NaN."""
    if len(payload) != payload_bytes(size, how):
        raise ValueError(f"has {len(payload)} bytes but {payload_bytes(size, how)} are its values")
    if how == "none":
        return _usable(np.frombuffer(payload, "<f4").astype(np.float32))
    count = _block_count(size)
    scales = _usable(np.frombuffer(payload[: 4 * count], "<f4").astype(np.float32))
    body = payload[4 * count :]
    codes = np.frombuffer(body, np.int8) if how == "int8" else _unpacked(body)
    return _usable(_values(scales, codes.reshape(count, BLOCK), size))


def payload_bytes(size: int, how: Quantization) -> int:
    """Return the bytes of a payload of `size` values."""
    if how == "none":
        return 4 * size
    return _block_count(size) * (4 + (BLOCK if how == "int8" else BLOCK // 2))


def _block_count(size: int) -> int:
    return -(-size // BLOCK)


def _blocks(values: Vector) -> Vector:
    padded = np.zeros(_block_count(values.size) * BLOCK, np.float32)
    padded[: values.size] = values
    return padded.reshape(-1, BLOCK)


def _values(scales: Vector, codes: np.ndarray, size: int) -> Vector:
    found: Vector = (codes.astype(np.float32) * scales[:, None]).reshape(-1)[:size]
    return found


def _packed(codes: np.ndarray) -> bytes:
    nibbles = (codes.reshape(-1) & 15).astype(np.uint8)
    return bytes((nibbles[0::2] | (nibbles[1::2] << 4)).tobytes())


def _unpacked(body: bytes) -> np.ndarray:
    pairs = np.frombuffer(body, np.uint8)
    nibbles = np.empty(2 * pairs.size, np.int16)
    nibbles[0::2], nibbles[1::2] = pairs & 15, pairs >> 4
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)


def count_unusable(values: Vector) -> int:
    """Return how many values are not finite, or above `LARGEST_VALUE`."""
    return int(values.size - (np.abs(values) <= LARGEST_VALUE).sum())


def _usable(values: Vector) -> Vector:
    if bad := count_unusable(values):
        raise ValueError(f"has {bad} values that are not finite, or above {LARGEST_VALUE:g}")
    return values


@dataclass(frozen=True)
class OuterGradient:
    """An encoded outer gradient, and the rounding error that the next one makes good."""

    payload: bytes
    values: Vector
    residual: Vector | None


def outer_gradient(
    common: Vector, snapshot: Vector, residual: Vector | None, how: Quantization
) -> OuterGradient | None:
    """Return common weights minus snapshot, plus the earlier rounding error.

    None if values are not finite, or too large to be of training.
    """
    gradient = common - snapshot
    if count_unusable(gradient):
        return None
    if residual is not None:
        gradient = gradient + residual
    encoded = encode(gradient, how)
    if count_unusable(encoded.values):  # with the earlier error, or by rounding up
        return None
    error = None if how == "none" else gradient - encoded.values
    return OuterGradient(encoded.payload, encoded.values, error)


def mixed(common: Vector, weights: Vector, snapshot: Vector, mixing: float) -> Vector:
    """Return the common weights, with what was trained since the snapshot.

    `mixing` is Streaming DiLoCo's alpha. Weights that are not finite are replaced.
    """
    if not np.isfinite(weights).all():
        return common.copy()
    merged = common + (weights - snapshot)
    if not mixing:
        return merged
    own = np.float32(mixing)
    return (np.float32(1) - own) * merged + own * weights

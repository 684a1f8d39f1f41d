"""Outer gradients in 8 or 4 bits: blocks of 256 values, each with a scale of its own.

A value becomes the nearest of 2 * limit + 1 multiples of its block's scale, largest value / limit,
so that its error is at most half a scale. Error feedback (arXiv 1901.09847) adds what a round's
rounding took away to the next one: over many rounds only the last round's error is missing.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector

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


def largest_error(values: Vector, how: Quantization) -> float:
    """Return the bound of one value's rounding error."""
    if how == "none" or not values.size:
        return 0.0
    return float(np.abs(values).max()) / LIMITS[how] / 2


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

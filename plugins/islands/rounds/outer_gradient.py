"""What an island sends of its training, and how it takes a round's result, for every transport."""

from dataclasses import dataclass

import numpy as np

from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector
from composer_mesh.plugins.islands.rounds.quantization import Quantization, count_unusable, encode


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


def count_not_finite(common: Vector, snapshot: Vector) -> int:
    """Return how many values of an outer gradient are not finite, or too large to be of one."""
    return count_unusable(common - snapshot)


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

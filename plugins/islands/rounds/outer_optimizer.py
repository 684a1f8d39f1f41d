"""The outer optimizers of DiLoCo (arXiv 2311.08105), on flat float32 arrays.

Every island computes the same round by itself, on whatever hardware. So each operation here is one
elementwise IEEE operation, whose result is the same everywhere: no fused multiply-add, no `pow`.
"""

from dataclasses import dataclass
from typing import Protocol

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
    """Number of arrays that a state keeps beside its weights."""

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

"""The common state of all fragments as one vector, which islands give to one that comes back."""

import hashlib
from collections.abc import Sequence

import numpy as np

from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    OuterOptimizer,
    OuterState,
    Vector,
    first_state,
    state_bytes,
    state_of,
)


class FragmentStates:
    """The outer optimizer's state of each fragment. A state is replaced, never changed."""

    def __init__(self, outer: OuterOptimizer, weights: Sequence[Vector]) -> None:
        self._outer = outer
        self.healed = False
        """Whether `load` has replaced the state since somebody set this to False."""
        self.now: tuple[OuterState, ...] = ()
        self.start(weights)

    @property
    def round(self) -> int:
        """The number of rounds of all fragments."""
        return sum(one.round for one in self.now)

    def start(self, weights: Sequence[Vector]) -> None:
        """Begin before the first round, from these weights of each fragment."""
        self.now = tuple(first_state(one, self._outer) for one in weights)

    def advance(self, index: int, gradient: Vector) -> None:
        """Take the outer step of one fragment."""
        new = self._outer.step(self.now[index], gradient)
        self.now = (*self.now[:index], new, *self.now[index + 1 :])

    def digest(self, index: int) -> bytes:
        """Return the SHA-256 of a fragment's state."""
        state = self.now[index]
        return hashlib.sha256(state.round.to_bytes(8, "little") + state_bytes(state)).digest()

    def dump(self) -> Vector:
        """Return the state as one vector."""
        return self.packed(self.now)

    def load(self, values: Vector) -> None:
        """Take the state of such a vector; raises ValueError for another length."""
        sizes = [one.weights.size for one in self.now]
        rounds, rest = values[: len(sizes)], values[len(sizes) :]
        lengths = [size * (1 + self._outer.slots) for size in sizes]
        if rest.size != sum(lengths):
            raise ValueError(f"a common state of {rest.size} values must have {sum(lengths)}")
        parts = np.split(rest, np.cumsum(lengths)[:-1])
        self.now = tuple(
            state_of(int(number), part.astype("<f4").tobytes(), size, self._outer)
            for number, part, size in zip(rounds.view("<i4"), parts, sizes, strict=True)
        )
        self.healed = True

    @staticmethod
    def packed(states: Sequence[OuterState]) -> Vector:
        """Return states as one vector: their rounds, as the bits of integers, then their arrays."""
        rounds = np.array([one.round for one in states], "<i4").view(np.float32)
        return np.concatenate([rounds, *(part for one in states for part in _arrays(one))])


def _arrays(state: OuterState) -> tuple[Vector, ...]:
    return (state.weights, *state.slots)

"""One island whose rounds are averaged by torchft's Manager, in place of an object store.

    begin   snapshot s of the weights; a background thread takes part in the next round
    merge   waits for it; then weights = common weights + (weights of now - s)

Every island averages the same fragment in a round: round r, counted from 0, is that of fragment
r modulo `fragments`. So the fragment is chosen after the quorum, in which an island that comes
back gets the common state and the round of the others.

`FragmentStates` is the common state of all fragments, which islands give to one that comes back.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.mesh.waiting import in_background
from composer_mesh.plugins.islands.rounds.all_reduce import Clock, RoundLost
from composer_mesh.plugins.islands.rounds.fragment_sync import Counts
from composer_mesh.plugins.islands.rounds.island import (
    IslandPort,
    IslandWeights,
    cut,
    layout_of,
    schedules,
)
from composer_mesh.plugins.islands.rounds.outer_optimizer import (
    OuterGradient,
    OuterOptimizer,
    OuterState,
    Vector,
    first_state,
    make_outer,
    mixed,
    outer_gradient,
    state_bytes,
    state_of,
)
from composer_mesh.plugins.islands.rounds.torchft_all_reduce import (
    Offer,
    RoundOutcome,
    TorchftAllReduce,
)
from composer_mesh.plugins.islands.store.opening import Traffic


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


Residuals = dict[int, Vector]


@dataclass
class PendingRound:
    """A round under way: the snapshot it averages, and what was kept when it began."""

    snapshot: Vector
    states: tuple[OuterState, ...]
    residuals: Residuals
    done: Future[RoundOutcome]


class ManagedIsland(IslandPort):
    """The rounds of one run, one at a time; not to be used before `join` or `restore`.

    Raises `LighthouseUnfit` for an address that cannot be used.
    """

    def __init__(self, config: IslandsConfig, steps: int, weights: IslandWeights) -> None:
        super().__init__()
        self._config, self._weights, self._steps = config, weights, steps
        self._clock = Clock()
        self._fragments = cut(weights.sizes, config.fragments)
        self._names = [name for one in self._fragments for name in one.sizes]
        self._ends = np.cumsum([one.size for one in self._fragments])[:-1]
        self._outer = make_outer(config.outer)
        nothing = [np.zeros(one.size, np.float32) for one in self._fragments]
        self._states = FragmentStates(self._outer, nothing)  # `join` and `restore` fill it
        self._residuals: Residuals = {}
        self._pending: PendingRound | None = None
        self._counts = Counts()
        self._islands: tuple[int, ...] | None = None
        (self._schedule,) = schedules(config, steps)
        names = json.dumps(layout_of(config, weights.sizes), sort_keys=True)
        layout = hashlib.sha256(names.encode()).digest()
        self._reduce = TorchftAllReduce(config, layout, self._states, self._clock)

    @property
    def counts(self) -> list[Counts]:
        return [self._counts]

    @property
    def round(self) -> int:
        return self._states.round

    @property
    def traffic(self) -> Traffic:
        return self._reduce.traffic

    def join(self) -> None:
        """Start from the run's own weights; its first round brings those of the others."""
        self._states.start(self._parts(self._read()))

    def restore(self, step: int, kept: Mapping[str, Vector]) -> None:  # noqa: ARG002  of the port
        """Continue after the checkpoint of a step, with what `kept` returned for it.

        If the others are further, the next round brings their common weights.
        """
        self._states.load(kept["common"])
        self._states.healed = False
        self._reduce.start_after(self._states.round)
        prefix = "residual."
        self._residuals = {
            int(name.removeprefix(prefix)): one
            for name, one in kept.items()
            if name.startswith(prefix)
        }
        if "snapshot" in kept:
            self._begin(kept["snapshot"])

    def kept(self) -> dict[str, Vector]:
        """Return what a checkpoint stores for `restore`, in addition to the weights."""
        pending = self._pending
        states = self._states.now if pending is None else pending.states
        residuals = self._residuals if pending is None else pending.residuals
        kept = {f"residual.{index}": one for index, one in residuals.items()}
        kept["common"] = FragmentStates.packed(states)
        if pending is not None:
            kept["snapshot"] = pending.snapshot
        return kept

    def after_step(self, step: int) -> dict[str, float]:
        """Begin and end what is due after a trained step; return figures of this step.

        Waits where a round ends, at most its deadline and a request. After the last step each
        fragment has a round, and the island leaves.
        """
        began = self._clock.now()
        if step == self._steps:
            if self._pending is not None:
                self._merge()
            for _ in self._fragments:
                self._begin(self._read())
                self._merge()
            self.finish()
        else:
            if self._schedule.begins(step):
                self._begin(self._read())
            if self._schedule.merges(step) and self._pending is not None:
                self._merge()
        return self.figures(self._clock.now() - began)

    def finish(self) -> None:
        """Leave, so that no island waits for this one."""
        self._reduce.close()

    def _begin(self, snapshot: Vector) -> None:
        states, residuals = self._states.now, dict(self._residuals)
        self._states.healed = False
        done = in_background(self._round(self._parts(snapshot)))
        self._pending = PendingRound(snapshot, states, residuals, done)

    def _round(self, snapshot: Sequence[Vector]) -> Callable[[], RoundOutcome]:
        """Return the work of a round, after which the common state is that of its end."""
        offered: dict[int, OuterGradient | None] = {}

        def offer(number: int) -> Offer:
            index = number % len(self._fragments)
            state = self._states.now[index]
            offered[index] = found = outer_gradient(
                state.weights,
                snapshot[index],
                self._residuals.get(index),
                self._config.quantization,
            )
            payload = None if found is None or self._states.healed else found.payload
            return Offer(payload, state.weights.size, self._states.digest(index))

        def work() -> RoundOutcome:
            outcome = self._reduce.average(offer)
            index = (outcome.round - 1) % len(self._fragments)
            gradient = offered[index]
            self._states.advance(index, outcome.mean)
            if self._states.healed:
                self._residuals.clear()
            elif outcome.gave and gradient is not None and gradient.residual is not None:
                self._residuals[index] = gradient.residual
            return outcome

        return work

    def _merge(self) -> None:
        """Wait for the round under way, and take what it has made into the weights."""
        pending, self._pending = self._pending, None
        assert pending is not None
        try:
            self._count(pending.done.result())
        except RoundLost as lost:
            self._counts.lost += 1
            self._tell("round_lost", str(lost))
        if self._states.healed:
            self._counts.dropped += 1
            self._tell("island_rejoined", f"has the common weights of round {self._states.round}")
        before, now = pending.states, self._states.now
        own, snapshot = self._parts(self._read()), self._parts(pending.snapshot)
        for index, fragment in enumerate(self._fragments):
            if now[index] is not before[index]:
                common = now[index].weights
                merged = mixed(common, own[index], snapshot[index], self._config.mixing)
                self._weights.write(list(fragment.sizes), merged)

    def _count(self, outcome: RoundOutcome) -> None:
        self._counts.merged += 1
        self._counts.contributors = len(outcome.islands)
        if not outcome.gave and not self._states.healed:
            self._counts.refused += 1
            self._tell("contribution_refused", "own outer gradient has values like NaN")
        if outcome.islands != self._islands:
            self._islands, names = outcome.islands, ", ".join(map(str, outcome.islands))
            of = f"{len(outcome.islands)} of {self._config.world_size} islands"
            self._tell("islands_changed", f"round {outcome.round} averages {of}: {names}")

    def _read(self) -> Vector:
        return self._weights.read(self._names)

    def _parts(self, flat: Vector) -> list[Vector]:
        return list(np.split(flat, self._ends))

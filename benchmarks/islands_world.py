"""Islands that train a small quadratic, over any store, in threads of one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.all_reduce import Clock
from composer_mesh.plugins.islands.rounds.island import Island
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector
from composer_mesh.plugins.islands.store.opening import ObjectStore

SIZES = {"a": 30, "b": 10, "c": 20, "d": 5}


class FlatWeights:
    """Named weights of one float32 vector each."""

    def __init__(self, sizes: Mapping[str, int] = SIZES, fill: float = 1.0) -> None:
        self._sizes = dict(sizes)
        self.of = {name: np.full(size, fill, np.float32) for name, size in sizes.items()}

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read(self, names: Sequence[str]) -> Vector:
        return np.concatenate([self.of[name] for name in names])

    def write(self, names: Sequence[str], values: Vector) -> None:
        ends = np.cumsum([self._sizes[name] for name in names])[:-1]
        for name, part in zip(names, np.split(values, ends), strict=True):
            self.of[name] = part.astype(np.float32)


def _briefly(seconds: float) -> None:
    """Sleep a tenth of the time: what is looked at often is found at once."""
    time.sleep(seconds / 10)


@dataclass
class Checkpoint:
    """What a run has on disk: a step, its weights, and what its island keeps with them."""

    step: int
    weights: dict[str, Vector]
    kept: dict[str, Vector]


@dataclass
class Run:
    """One island's run: inner SGD towards a target of its own, with a checkpoint at each step."""

    rank: int
    config: IslandsConfig
    store: ObjectStore
    steps: int
    lr: float = 0.1
    clock: Clock = field(default_factory=lambda: Clock(sleep=_briefly))
    checkpoint_every: int = 1
    weights: FlatWeights = field(default_factory=FlatWeights)
    step: int = 0
    island: Island | None = None
    checkpoint: Checkpoint | None = None
    figures: list[dict[str, float]] = field(default_factory=list)
    new_events: list[tuple[str, str]] = field(default_factory=list)

    def open(self) -> None:
        """Start, or continue from the newest checkpoint, as a new process."""
        self.weights, self.island = FlatWeights(), None
        island = Island(self.config, self.steps, self.weights, self.store, self.clock)
        if self.checkpoint is None:
            self.step = 0
            island.join()
        else:
            self.step = self.checkpoint.step
            self.weights.of = {name: one.copy() for name, one in self.checkpoint.weights.items()}
            island.restore(self.step, self.checkpoint.kept)
        self.island = island

    def train(self) -> None:
        """Train one step and do what is due after it."""
        assert self.island is not None
        for name, value in self.weights.of.items():
            gradient = value - self.target(name)
            self.weights.of[name] = (value - np.float32(self.lr) * gradient).astype(np.float32)
        self.step += 1
        self.figures.append(self.island.after_step(self.step))
        self.new_events += self.island.new_events()
        if self.step % self.checkpoint_every == 0:
            kept = {name: one.copy() for name, one in self.island.kept().items()}
            weights = {name: one.copy() for name, one in self.weights.of.items()}
            self.checkpoint = Checkpoint(self.step, weights, kept)

    def target(self, name: str) -> Vector:
        """Where this island's data draws a weight."""
        size = SIZES[name]
        return np.linspace(-1, 1, size).astype(np.float32) * (self.rank + 1)

    def to_the_end(self) -> None:
        """Train all steps from here."""
        if self.island is None:
            self.open()
        while self.step < self.steps:
            self.train()
        assert self.island is not None
        self.island.finish()

    @property
    def flat(self) -> Vector:
        """All weights as one vector."""
        return self.weights.read(list(SIZES))


def island_config(rank: int, count: int, **changes: Any) -> IslandsConfig:
    """Return the config of one of several islands, with plain averaging unless changed."""
    table: dict[str, Any] = {
        "store": "file:///unused",
        "rank": rank,
        "world_size": count,
        "steps_per_round": 4,
        "outer": {"lr": 1.0, "momentum": 0.0},
        "deadline_s": 30.0,
        "request_s": 30.0,
        "member": f"{rank:016x}",
    }
    return IslandsConfig.model_validate(table | changes)


def together(runs: Sequence[Callable[[], object]]) -> None:
    """Run functions in threads; raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "an island hangs"
    if errors:
        raise errors[0]

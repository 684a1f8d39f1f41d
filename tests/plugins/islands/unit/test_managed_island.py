"""Islands by torchft between steps: fragments, overlap, checkpoints, NaN; real lighthouses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from islands_world import SIZES, FlatWeights
from lighthouses import lighthouse_server

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.island import schedules
from composer_mesh.plugins.islands.rounds.managed_island import ManagedIsland
from composer_mesh.plugins.islands.rounds.outer_optimizer import Vector

NAMES = list(SIZES)
STEPS = 8


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with lighthouse_server(min_replicas=2) as address:
        yield address


class Run:
    """A run whose step moves each weight by its rank and the step."""

    def __init__(self, lighthouse: str, rank: int, steps: int = STEPS, **config: Any) -> None:
        known = {"steps_per_round": 2, "quorum": 2, "request_s": 20.0, "deadline_s": 100.0}
        where = {"lighthouse": lighthouse, "rank": rank, "world_size": 2}
        self.config = IslandsConfig.model_validate({**known, **where, **config})
        self.weights, self.steps, self.step = FlatWeights(), steps, 0
        self.island = ManagedIsland(self.config, steps, self.weights)
        self.island.join()
        self.figures: list[dict[str, float]] = []
        self.moves: dict[int, float] = {}

    def train(self, until: int) -> None:
        while self.step < until:
            self.step += 1
            move = self.moves.get(self.step, 0.01 * self.step * (1 + self.config.rank))
            for name in NAMES:
                self.weights.of[name] = self.weights.of[name] + np.float32(move)
            self.figures.append(self.island.after_step(self.step))

    @property
    def flat(self) -> Vector:
        return self.weights.read(NAMES)


def both(work: Callable[[Run], Any], runs: list[Run]) -> None:
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(work, runs))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fragments": 2, "steps_per_round": 4, "overlap_steps": 1, "quantization": "int8"},
        {"outer": {"type": "adam"}, "overlap_steps": 1},
    ],
)
def test_islands_with_equal_steps_end_with_equal_weights(
    lighthouse: str, config: dict[str, Any]
) -> None:
    runs = [Run(lighthouse, rank, **config) for rank in range(2)]

    both(lambda run: run.train(STEPS), runs)

    assert (runs[0].flat == runs[1].flat).all()
    assert (runs[0].flat != 1).all()
    assert all(one.figures[-1]["islands/contributors"] == 2 for one in runs)
    assert sum(one["islands/lost"] for run in runs for one in run.figures) == 0


def test_a_plain_average_is_the_mean_of_the_weights(lighthouse: str) -> None:
    runs = [Run(lighthouse, rank, 2, outer={"lr": 1.0, "momentum": 0.0}) for rank in range(2)]

    both(lambda run: run.train(2), runs)

    assert np.abs(runs[0].flat - (1 + np.mean([0.03, 0.06]))).max() <= 1e-6
    assert runs[0].figures[-1]["islands/bytes_sent"] > 0


def test_a_restored_island_ends_as_one_that_never_stopped(lighthouse: str) -> None:
    config = {"quantization": "int8", "overlap_steps": 1}
    runs = [Run(lighthouse, rank, **config) for rank in range(2)]
    both(lambda run: run.train(STEPS), runs)
    whole = runs[0].flat

    first = [Run(lighthouse, rank, **config) for rank in range(2)]
    both(lambda run: run.train(5), first)
    for one in first:
        one.island.finish()
    again = [Run(lighthouse, rank, **config) for rank in range(2)]
    for old, new in zip(first, again, strict=True):
        new.step, new.weights.of = old.step, {k: v.copy() for k, v in old.weights.of.items()}
        new.island.restore(5, {k: v.copy() for k, v in old.island.kept().items()})
    both(lambda run: run.train(STEPS), again)

    assert (again[0].flat == whole).all()
    assert (again[1].flat == whole).all()


def test_a_checkpoint_within_a_round_opens_it_again(lighthouse: str) -> None:
    runs = [Run(lighthouse, rank, overlap_steps=1) for rank in range(2)]
    both(lambda run: run.train(2), runs)

    kept = runs[0].island.kept()

    assert (kept["snapshot"] == runs[0].flat).all()
    both(lambda run: run.train(STEPS), runs)


def test_an_island_that_is_behind_heals_and_contributes_again_within_a_quorum_of_all(
    lighthouse: str,
) -> None:
    config = {"outer": {"lr": 1.0, "momentum": 0.0}}
    runs = [Run(lighthouse, rank, **config) for rank in range(2)]
    both(lambda run: run.train(2), runs)
    weights, kept = runs[1].flat, runs[1].island.kept()
    both(lambda run: run.train(4), runs)
    runs[1].island.finish()
    again = Run(lighthouse, 1, **config)
    again.step = 2
    again.weights.write(NAMES, weights)
    again.island.restore(2, kept)
    runs[1] = again

    both(lambda run: run.train(STEPS), runs)

    assert (runs[0].flat == runs[1].flat).all()
    assert [sum(one["islands/lost"] for one in run.figures) for run in runs] == [0, 1]
    assert [kind for kind, _ in again.island.new_events()].count("island_rejoined") == 1
    rank_0, rank_1 = (0.01 * (1 + rank) * (5 + 6 + 7 + 8) for rank in (0, 1))
    common = 1 + (0.01 + 0.02) * (1 + 2 + 3 + 4) / 2
    assert np.abs(runs[0].flat - (common + (rank_0 + rank_1) / 2)).max() <= 1e-5


def test_an_island_whose_weights_are_not_finite_takes_those_of_the_others(lighthouse: str) -> None:
    runs = [
        Run(lighthouse, rank, 2, quorum=1, outer={"lr": 1.0, "momentum": 0.0}) for rank in range(2)
    ]
    runs[1].moves[2] = float("nan")

    both(lambda run: run.train(2), runs)

    assert np.abs(runs[0].flat - 1.03).max() <= 1e-6
    assert (runs[1].flat == runs[0].flat).all()
    assert "contribution_refused" in [kind for kind, _ in runs[1].island.new_events()]


def test_rounds_of_fragments_take_turns_in_one_schedule() -> None:
    config = IslandsConfig.model_validate(
        {"lighthouse": "http://127.0.0.1:1", "steps_per_round": 6, "fragments": 3}
    )
    (one,) = schedules(config, 7)
    assert [step for step in range(1, 8) if one.begins(step)] == [2, 4, 6, 7]

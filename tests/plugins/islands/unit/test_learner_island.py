"""Learners as islands: common weights, checkpoints in the middle of a round, sharded weights."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from islands_world import together
from step_batches import batch_of

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local

STEPS = 6
ISLANDS = {
    "steps_per_round": 2,
    "fragments": 2,
    "overlap_steps": 1,
    "quantization": "int8",
    "deadline_s": 60.0,
}


class World:
    """Learners of one policy that meet in a folder."""

    def __init__(self, build_config: Any, build_model: Any, tokenizer: Any, folder: Path) -> None:
        self._build_config, self._folder = build_config, folder
        self.model = build_model(1)
        save_policy(self.model, tokenizer, folder / "policy")

    def learner(
        self, rank: int, count: int, store: str, ranks: Ranks | None = None, **trainer: Any
    ) -> Learner:
        islands = {"store": f"file://{self._folder}/{store}", "rank": rank, "world_size": count}
        config = self._build_config(
            run={"steps": STEPS},
            trainer={"lr": 1e-3, "microbatch_tokens": 512, **trainer},
            islands={**ISLANDS, **islands, "member": f"{rank:016x}"},
        )
        return Learner(config, self._folder / "policy", ranks or Ranks())

    def train(self, learner: Learner, rank: int, until: int = STEPS) -> None:
        """Train with batches that depend on the island and the step only."""
        while learner.version < until:
            rng = random.Random(100 * rank + learner.version)
            batch = batch_of(self.model, rng, samples=4)
            learner.train(replace(batch, step=learner.version), None)


@pytest.fixture
def world(build_config: Any, build_model: Any, tokenizer: Any, tmp_path: Path) -> World:
    return World(build_config, build_model, tokenizer, tmp_path)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: local(one.detach()).clone() for name, one in learner.step.weights.items()}


def assert_same(one: Learner, other: Learner) -> None:
    first, second = weights_of(one), weights_of(other)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def lived(world: World, store: str) -> list[Learner]:
    """Two learners that trained to the end side by side."""
    learners = [world.learner(rank, 2, store) for rank in range(2)]

    def live(rank: int) -> None:
        learners[rank].join_islands()
        world.train(learners[rank], rank)

    together([lambda: live(0), lambda: live(1)])
    return learners


def test_two_learners_end_with_common_weights_that_neither_began_with(world: World) -> None:
    one, two = lived(world, "store")

    assert_same(one, two)
    start = dict(world.model.named_parameters())
    assert any(not torch.equal(start[name], value) for name, value in weights_of(one).items())
    assert not one.new_events()


def test_a_learner_that_goes_on_from_a_checkpoint_within_a_round_ends_the_same(
    world: World, tmp_path: Path
) -> None:
    expected = lived(world, "undisturbed")[0]
    learners = [world.learner(rank, 2, "store") for rank in range(2)]

    def live() -> None:
        learners[0].join_islands()
        world.train(learners[0], 0)

    def die_and_live() -> None:
        learners[1].join_islands()
        world.train(learners[1], 1, until=2)
        (tmp_path / "step").mkdir()
        learners[1].copy(False)
        learners[1].write(tmp_path / "step", False)
        world.train(learners[1], 1, until=5)
        learners[1] = world.learner(1, 2, "store")
        learners[1].restore(tmp_path / "step")
        assert learners[1].version == 2
        world.train(learners[1], 1)

    together([live, die_and_live])

    assert_same(learners[0], expected)
    assert_same(learners[1], expected)


def test_sharded_weights_are_averaged_as_whole_ones(world: World, ranks: Ranks) -> None:
    whole = world.learner(0, 1, "whole")
    sharded = world.learner(0, 1, "sharded", ranks, sharding="fsdp2")
    for learner in (whole, sharded):
        learner.join_islands()
        world.train(learner, 0)

    first, second = weights_of(whole), weights_of(sharded)
    for (name, one), other in zip(first.items(), second.values(), strict=True):
        torch.testing.assert_close(other, one, msg=name, rtol=1e-4, atol=1e-5)

"""Several updates of a step: each is the update of its part, on ratios to the step's start.

Pairs with an update of their own: that of a second optimizer after the shared one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from step_batches import ALL_ON, NARROW, batch_of, largest_change, nearby, weights_of
from torch import Tensor

from composer_mesh.actors.learning.learner import Learner
from composer_mesh.actors.learning.step import OWN as OWN_STATE
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.models.policy import save_policy
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.losses.policy import decoupled_ppo_loss, grpo_loss
from composer_mesh.planning.memory import total
from composer_mesh.planning.memory_estimate import memory_of
from composer_mesh.planning.model_sizes import sizes_of
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.step_plan import minibatches

RATE = 0.1


def plain_descent(weights: Any) -> list[torch.optim.Optimizer]:
    """SGD: of Adam's first updates only the signs of gradients count."""
    return [torch.optim.SGD(weights.values(), lr=RATE)]


@pytest.fixture
def step_of(build_config: Any, build_model: Any) -> Callable[..., Any]:
    def build(loss: dict[str, Any], budget: int = 10_000, **trainer: Any) -> Any:
        trainer = {"lr": RATE, "grad_clip": 1e9, "microbatch_tokens": budget, **trainer}
        model, frozen = build_model(1), nearby(build_model(1)).requires_grad_(False)
        config = build_config(
            **{**NARROW, "trainer": trainer, "loss": loss, "replay": ALL_ON["replay"]}
        )
        reference = frozen if config.loss.needs_reference else None
        return model, OptimizerStep(model, reference, config, optimizers=plain_descent)

    return build


def grouped(model: Any, rng: random.Random, count: int = 8, size: int = 2) -> StepBatch:
    """A batch whose log-probs are the model's own, in groups."""
    batch = batch_of(model, rng, samples=count, pairs=3)
    samples = [
        replace(one, group_id=at // size, logprobs=own_logprobs(model, one))
        for at, one in enumerate(batch.samples)
    ]
    return replace(batch, samples=samples, views=[])


@torch.no_grad()
def own_logprobs(model: Any, sample: Any) -> list[float]:
    found = now(model, sample).tolist()
    return [0.0, *(one if own else 0.0 for one, own in zip(found, sample.mask[1:], strict=True))]


def now(model: Any, sample: Any) -> Tensor:
    """Log-probs [T - 1] of a sample's ids."""
    logits = model(input_ids=torch.tensor([sample.ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, torch.tensor(sample.ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("budget", [64, 10_000])
def test_updates_are_those_of_steps_on_the_parts(
    step_of: Callable[..., Any], rng: random.Random, budget: int
) -> None:
    (one, several), (two, single) = (
        step_of({}, budget, updates_per_batch=2),
        step_of({}, budget),
    )
    batch = grouped(one, rng)
    found = several.run(batch, None)
    parts = minibatches(batch, 2)
    expected = [single.run(part, None) for part in parts]
    assert len(parts) == 2
    assert largest_change(weights_of(one), weights_of(two)) < 1e-6
    for name in ("loss/policy", "loss/replay", "policy/grad_norm", "policy/clipped_fraction"):
        mean = sum(part[name] for part in expected) / 2
        assert found[name] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert found["policy/updates"] == 2
    assert found["tokens/trained"] == batch.action_tokens


def test_nothing_is_clipped_in_the_first_update_and_something_after_it(
    step_of: Callable[..., Any], rng: random.Random
) -> None:
    (model, first), (_, both) = step_of({}), step_of({}, epochs=2)
    batch = grouped(model, rng)
    once, twice = first.run(batch, None), both.run(batch, None)
    assert once["policy/clipped_fraction"] == 0
    assert twice["policy/clipped_fraction"] > 0
    # Sampling and training are compared at the step's start, of which updates are no part.
    assert twice["logprob_mismatch/max"] == once["logprob_mismatch/max"] < 1e-5


def by_hand(
    model: Any, batch: StepBatch, loss: Callable[..., Any], updates: int, epochs: int
) -> list[Tensor]:
    """The losses of plain descent on whole logits, one microbatch an update, no replay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with torch.no_grad():
        start = {one.trace_id: now(model, one) for one in batch.samples}
    losses = []
    for part in minibatches(batch, updates, epochs):
        optimizer.zero_grad()
        total = sum(loss(now(model, one), start[one.trace_id], one, part) for one in part.samples)
        total.backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(total.detach())  # type: ignore[union-attr]
    return losses


def of_grpo(own: Tensor, _: Tensor, sample: Any, part: StepBatch) -> Tensor:
    found = grpo_loss(
        own[None],
        torch.tensor([sample.logprobs[1:]]),
        torch.tensor([sample.advantage]),
        torch.tensor([sample.mask[1:]]),
        clip_high=0.28,
        aggregation="dapo",
        normalizer=part.action_tokens,
    )
    return found.loss


def of_decoupled_ppo(own: Tensor, start: Tensor, sample: Any, part: StepBatch) -> Tensor:
    found = decoupled_ppo_loss(
        own[None],
        start[None],
        torch.tensor([sample.logprobs[1:]]),
        torch.tensor([sample.advantage]),
        torch.tensor([sample.mask[1:]]),
        normalizer=part.action_tokens,
    )
    return found.loss


@pytest.mark.parametrize("budget", [64, 10_000])
@pytest.mark.parametrize(
    ("name", "function"), [("grpo", of_grpo), ("decoupled_ppo", of_decoupled_ppo)]
)
def test_later_updates_see_the_log_probs_of_the_start(
    step_of: Callable[..., Any],
    build_model: Any,
    rng: random.Random,
    name: str,
    function: Callable[..., Any],
    budget: int,
) -> None:
    model, step = step_of({"type": name}, budget, updates_per_batch=2, epochs=2)
    batch = replace(grouped(model, rng), pairs=[])
    other = build_model(1)
    losses = by_hand(other, batch, function, 2, 2)
    assert len(losses) == 4
    found = step.run(batch, None)
    assert found["loss/policy"] == pytest.approx(float(sum(losses)) / 4, rel=1e-4, abs=1e-6)
    assert largest_change(weights_of(model), weights_of(other)) < 1e-5


def test_the_weights_wait_for_their_publisher_before_the_first_update_only(
    step_of: Callable[..., Any], rng: random.Random
) -> None:
    model, step = step_of({}, updates_per_batch=2)
    batch, before = grouped(model, rng), weights_of(model)
    waits: list[float] = []
    step.run(batch, None, lambda: waits.append(float(largest_change(before, weights_of(model)))))
    assert waits == [0.0]


OWN = {**ALL_ON["replay"], "update": "own"}


TRAINER = {"lr": 1e-2, "microbatch_tokens": 256, "grad_clip": 0.1}


def batches(model: Any, count: int = 2, pairs: int = 4) -> list[StepBatch]:
    rng = random.Random(3)
    found = [batch_of(model, rng, samples=6, pairs=pairs) for _ in range(count)]
    return [replace(one, views=[], step=step) for step, one in enumerate(found)]


def equal(one: Any, two: Any) -> bool:
    others = weights_of(two)
    return all(torch.equal(weight, others[name]) for name, weight in weights_of(one).items())


@pytest.mark.parametrize("sharing", [False, True])
def test_the_weights_are_those_of_two_optimizers_one_after_the_other(
    build_config: Any, build_model: Any, sharing: bool
) -> None:
    trainer = {**TRAINER, "prefix_sharing": sharing}
    own, apart = build_model(1), build_model(1)
    step = OptimizerStep(own, None, build_config(**NARROW, trainer=trainer, replay=OWN))
    shared = OptimizerStep(apart, None, build_config(**NARROW, trainer=trainer))
    pairs = OptimizerStep(
        apart, None, build_config(**NARROW, trainer=trainer, replay=ALL_ON["replay"])
    )
    for batch in batches(own):
        found = step.run(batch, None)
        policy = shared.run(replace(batch, pairs=[]), None)
        replay = pairs.run(replace(batch, samples=[]), None)
        assert equal(own, apart)
        assert found["policy/grad_norm"] == policy["policy/grad_norm"]
        assert found["replay/grad_norm"] == replay["policy/grad_norm"]
        assert found["loss/replay"] == replay["loss/replay"]
        assert found["loss/policy"] == policy["loss/policy"]
        assert found["loss/total"] == pytest.approx(
            policy["loss/policy"] + 0.3 * replay["loss/replay"]
        )


def test_a_step_without_pairs_leaves_their_optimizer_alone(
    build_config: Any, build_model: Any
) -> None:
    model = build_model(1)
    step = OptimizerStep(model, None, build_config(**NARROW, trainer=TRAINER, replay=OWN))
    (batch,) = batches(model, 1, pairs=0)
    found = step.run(batch, None)
    assert found["loss/replay"] is None
    assert "replay/lr" not in found
    assert not any(name.startswith(OWN_STATE) for name in step.optimizer_state())


def test_the_rate_follows_the_schedule_and_the_loss_does_not(
    build_config: Any, build_model: Any
) -> None:
    falling = {**OWN, "beta_schedule": {"decay": "linear"}}
    changed = []
    for replay in (OWN, falling):
        model = build_model(1)
        config = build_config(**NARROW, trainer=TRAINER, replay=replay, run={"steps": 4})
        step = OptimizerStep(model, None, config)
        (batch,) = batches(model, 1)
        found = step.run(replace(batch, step=2), None)
        changed.append((found["replay/grad_norm"], found["replay/lr"], found["policy/lr"]))
    (norm, rate, own), (fallen_norm, fallen, fallen_own) = changed
    assert norm == fallen_norm
    assert fallen == pytest.approx(rate / 2)
    assert own == fallen_own


def test_each_of_several_updates_is_followed_by_that_of_its_pairs(
    build_config: Any, build_model: Any
) -> None:
    model = build_model(1)
    trainer = {**TRAINER, "updates_per_batch": 2}
    step = OptimizerStep(model, None, build_config(**NARROW, trainer=trainer, replay=OWN))
    (batch,) = batches(model, 1)
    groups = [replace(one, group_id=at // 3) for at, one in enumerate(batch.samples)]
    found = step.run(replace(batch, samples=groups), None)
    assert found["policy/updates"] == 2
    counts = {
        float(state)
        for name, state in step.optimizer_state().items()
        if name.startswith(OWN_STATE) and name.endswith("/step")
    }
    assert counts == {2.0}


@pytest.fixture
def folder(build_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    path = tmp_path / "policy"
    save_policy(build_model(1), tokenizer, path)
    return path


@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_trainer_goes_on_bit_for_bit(
    build_config: Any, build_model: Any, folder: Path, tmp_path: Path, offload: bool
) -> None:
    trainer = {**TRAINER, "optimizer_offload": offload}
    config = build_config(**NARROW, trainer=trainer, replay=OWN)
    first, second = batches(build_model(1))
    learner = Learner(config, folder, Ranks())
    learner.train(first, None)
    learner.copy()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    learner.write(checkpoint)
    resumed = Learner(config, folder, Ranks())
    resumed.restore(checkpoint)
    kept = resumed.step.optimizer_state()
    assert {name.startswith(OWN_STATE) for name in kept} == {False, True}
    expected, found = learner.train(second, None), resumed.train(second, None)
    assert expected["replay/grad_norm"] == found["replay/grad_norm"]
    assert equal(learner.model, resumed.model)


def test_a_sharded_model_has_the_same_updates(
    build_config: Any, build_model: Any, folder: Path
) -> None:
    found = []
    try:
        for sharding in ("none", "fsdp2"):
            trainer = {**TRAINER, "sharding": sharding}
            config = build_config(**NARROW, trainer=trainer, replay=OWN)
            learner = Learner(config, folder, Ranks())
            found.append([learner.train(one, None) for one in batches(build_model(1))])
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    for whole, sharded in zip(*found, strict=True):
        for name in ("loss/policy", "loss/replay", "policy/grad_norm", "replay/grad_norm"):
            assert sharded[name] == pytest.approx(whole[name], rel=1e-5)


def test_check_counts_both_optimizers(build_config: Any) -> None:
    def state(update: str) -> int:
        config = build_config(**NARROW, replay={**OWN, "update": update})
        parts = memory_of("trainer", config, sizes_of(config.policy)).host
        return total([part for part in parts if part.what == "optimizer state"])

    assert state("own") == 2 * state("shared") > 0


def test_an_own_update_has_no_share_to_bound(build_config: Any) -> None:
    with pytest.raises(ValidationError, match="set update to 'shared'"):
        build_config(replay={**OWN, "max_update_share": 0.3})

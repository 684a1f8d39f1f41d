"""Advantages of turns in a step: equal ones train as one number, others each on its own turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from policy_cases import CASES, RATE
from repetition import crossed
from step_batches import (
    NARROW,
    assert_gradients_are,
    batch_of,
    gradients_of,
    nearby,
    own_logprobs,
    sampled_trace,
)

from composer_mesh.actors.learning.policy_channel import advantages_of
from composer_mesh.actors.learning.step import ThreeChannelStep
from composer_mesh.channels.policy.samples import policy_sample
from composer_mesh.rollouts.batches import PolicySample, Skipped, StepBatch
from composer_mesh.rollouts.step_plan import plan_step

Build = Callable[..., Any]


@pytest.fixture
def step_of(build_config: Any, build_model: Any) -> Build:
    def build(loss: dict[str, Any], **trainer: Any) -> Any:
        trainer = {"lr": RATE, "grad_clip": 1e9, "microbatch_tokens": 150, **trainer}
        config = build_config(**NARROW, trainer=trainer, loss=loss)
        model, frozen = build_model(1), nearby(build_model(1)).requires_grad_(False)
        reference = frozen if config.loss.needs_reference else None
        return model, ThreeChannelStep(model, reference, config), config

    return build


def by_id(sample: PolicySample) -> PolicySample:
    """The sample with its advantage written for each of its ids."""
    assert not isinstance(sample.advantage, list)
    return replace(sample, advantage=[sample.advantage * own for own in sample.mask])


@pytest.mark.parametrize(("name", "packing"), crossed([*CASES], [False, True]))
def test_equal_advantages_of_all_turns_train_as_one_of_the_rollout(
    step_of: Build, rng: random.Random, name: str, packing: bool
) -> None:
    model, one, config = step_of(CASES[name][0], packing=packing)
    other_model, other, _ = step_of(CASES[name][0], packing=packing)
    batch = replace(batch_of(model, rng), views=[])
    written = replace(batch, samples=[by_id(sample) for sample in batch.samples])
    expected = one.run(batch, None)
    if config.loss.refuses_turn_advantages and "off_policy_threshold" not in CASES[name][0]:
        if config.loss.type in ("grpo", "gmpo", "vespo"):
            with pytest.raises(ValueError, match="one per token, but"):
                other.run(written, None)
        return
    found = other.run(written, None)
    assert found["loss/policy"] == expected["loss/policy"]
    for weights, others in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(weights.grad, others.grad)


def turns_of(model: Any, rng: random.Random, samples: int = 6) -> tuple[StepBatch, list[Any]]:
    """A batch on policy whose every turn has an advantage of its own, and its traces."""
    traces = [sampled_trace(model, rng, f"t{n}", 0.0) for n in range(samples)]
    advantages = [[rng.uniform(-1, 1) for _ in trace.turns] for trace in traces]
    made = [policy_sample(t, a) for t, a in zip(traces, advantages, strict=True)]
    return StepBatch(0, made, [], []), list(zip(traces, advantages, strict=True))


def expected_loss(model: Any, pairs: list[Any], tokens: int) -> torch.Tensor:
    """Advantage times log-prob, turn by turn."""
    total = torch.zeros(())
    for trace, advantages in pairs:
        logprobs, at = own_logprobs(model, trace.token_ids()), 0
        for turn, advantage in zip(trace.turns, advantages, strict=True):
            first = at + len(turn.context_ids) - 1
            at += len(turn.context_ids) + len(turn.action_ids)
            total = total - advantage * logprobs[first : at - 1].sum()
    return total / tokens


@pytest.mark.parametrize("packing", [False, True])
def test_each_turn_is_trained_by_its_own_advantage(
    step_of: Build, rng: random.Random, packing: bool
) -> None:
    model, step, _ = step_of({"type": "reinforce"}, packing=packing)
    batch, pairs = turns_of(model, rng)
    expected = expected_loss(model, pairs, batch.action_tokens)
    gradients = gradients_of(expected, model)
    found = step.run(batch, None)
    assert found["loss/policy"] == pytest.approx(expected.item(), rel=1e-4)
    assert_gradients_are(gradients, model)


def test_the_shares_of_two_ranks_add_up_to_the_gradient_of_the_step(
    step_of: Build, rng: random.Random
) -> None:
    model, whole, _ = step_of({"type": "reinforce"})
    batch, _ = turns_of(model, rng)
    whole.run(batch, None)
    gradients = [weights.grad.clone() for weights in model.parameters()]
    sums = [torch.zeros_like(gradient) for gradient in gradients]
    for plan in plan_step(batch, 150, 2):
        other, step, _ = step_of({"type": "reinforce"})
        own = [batch.samples[place] for one in plan.microbatches for place in one.samples]
        tokens = batch.action_tokens - sum(sum(sample.mask) for sample in own)
        elsewhere = Skipped(batch.sequences - len(own), tokens)
        step.run(replace(batch, samples=own, skipped=elsewhere), None)
        sums = [one + weights.grad for one, weights in zip(sums, other.parameters(), strict=True)]
    for total, gradient in zip(sums, gradients, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-3, atol=1e-6)


def test_a_custom_loss_reads_the_advantage_of_each_token(
    step_of: Build, write_module: Callable[[str, str], None], rng: random.Random
) -> None:
    write_module(
        "users_turns",
        "from composer_mesh import LossInputs, LossOutputs\n\n\n"
        "def loss(inputs: LossInputs) -> LossOutputs:\n"
        "    terms = inputs.advantages * inputs.trainer_logprobs\n"
        "    return LossOutputs(loss=-terms[inputs.loss_mask].sum())\n",
    )
    model, step, _ = step_of({"type": "custom", "import_path": "users_turns.loss"})
    batch, pairs = turns_of(model, rng)
    mixed = replace(batch, samples=[*batch.samples[:-1], policy_sample(pairs[-1][0], 0.25)])
    pairs[-1] = (pairs[-1][0], [0.25] * len(pairs[-1][1]))
    expected = expected_loss(model, pairs, batch.action_tokens)
    gradients = gradients_of(expected, model)
    step.run(mixed, None)
    assert_gradients_are(gradients, model)


def test_advantages_of_rollouts_alone_stay_one_number_each() -> None:
    one = PolicySample("a", [1, 2, 3], [False, True, True], [0.0, -1, -1], 0.5, [-1, 0, 0])
    assert advantages_of([one, one]).tolist() == [0.5, 0.5]
    long = replace(one, ids=[1, 2, 3, 4], advantage=[0.0, 0.0, 2.0, 3.0])
    assert advantages_of([one, long]).tolist() == [[0.5, 0.5, 0.0], [0.0, 2.0, 3.0]]

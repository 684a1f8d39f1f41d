"""The policy channel: each loss of the config is its function on whole logits, however it is split.

What is expected is written here with every option by name, from one unpadded forward a sequence.

Advantages of turns in a step: equal ones train as one number, others each on its own turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from policy_cases import CASES, RATE, ratio, whole
from repetition import repeated
from step_batches import (
    NARROW,
    assert_gradients_are,
    batch_of,
    gradients_of,
    nearby,
    own_logprobs,
    sampled_trace,
)
from torch.nn.utils.rnn import pad_sequence

from composer_mesh.actors.learning.policy_channel import advantages_of
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.channels.policy import policy_sample
from composer_mesh.losses.policy import (
    aggregate,
    grpo_loss,
    high_entropy_mask,
    reinforce_loss,
    token_entropies,
)
from composer_mesh.rollouts.batches import PolicySample, Skipped, StepBatch
from composer_mesh.rollouts.step_plan import plan_step


@pytest.fixture
def step_of(build_config: Any, build_model: Any) -> Callable[..., Any]:
    """Model, reference and step for a loss; gradients are left unclipped."""

    def build(loss: dict[str, Any], *, budget: int = 10_000, temperature: float = 1.0) -> Any:
        trainer = {"lr": RATE, "grad_clip": 1e9, "microbatch_tokens": budget}
        generator = {**NARROW["generator"], "temperature": temperature}
        sections = {**NARROW, "trainer": trainer, "generator": generator, "loss": loss}
        model, frozen = build_model(1), nearby(build_model(1)).requires_grad_(False)
        config = build_config(**sections)
        reference = frozen if config.loss.needs_reference else None
        return model, frozen, OptimizerStep(model, reference, config)

    return build


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_loss_and_gradients_of_its_function_on_whole_logits(
    step_of: Callable[..., Any], rng: random.Random, name: str
) -> None:
    loss, function = CASES[name]
    model, frozen, step = step_of(loss, budget=150)
    batch = batch_of(model, rng)
    expected = function(whole(model, frozen, batch, 1.0))
    gradients = gradients_of(expected.loss, model)
    found = step.run(batch, None)
    assert found["loss/policy"] == pytest.approx(expected.loss.item(), rel=1e-4, abs=1e-5)
    assert found["policy/clipped_fraction"] == pytest.approx(expected.clipped_fraction.item())
    if expected.kl_reference is not None:
        assert found["policy/kl_reference"] == pytest.approx(expected.kl_reference.item(), rel=1e-3)
    assert_gradients_are(gradients, model)


@pytest.mark.parametrize("budget", [10_000, 64])
def test_an_entropy_bonus_is_the_mean_over_the_sampled_tokens_of_the_step(
    step_of: Callable[..., Any], rng: random.Random, budget: int
) -> None:
    loss = {"aggregation": "grpo", "entropy_coef": 0.3}
    model, frozen, step = step_of(loss, budget=budget, temperature=0.8)
    batch = batch_of(model, rng)
    w = whole(model, frozen, batch, 0.8)
    rows = [
        token_entropies(model(input_ids=torch.tensor([sample.ids])).logits[0, :-1], 0.8)
        for sample in batch.samples
    ]
    entropy = aggregate(pad_sequence(rows, batch_first=True), w.mask, "dapo", w.tokens)
    expected = ratio(grpo_loss, w, "grpo", clip_high=0.28).loss - 0.3 * entropy
    gradients = gradients_of(expected, model)
    found = step.run(batch, None)
    assert found["policy/entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert found["loss/policy"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert_gradients_are(gradients, model)


TOP = {
    "grpo": ({"kl_beta": 0.2}, lambda w, top: chosen(grpo_loss, w, top, kl_beta=0.2)),
    "gspo": (
        {"ratio_level": "sequence", "correction": "token_truncate"},
        lambda w, top: grpo_loss(
            w.now,
            w.now.detach(),
            w.advantages,
            w.mask,
            aggregation="dapo",
            normalizer=w.tokens,
            ratio_level="sequence",
            clip_low=0.2,
            clip_high=0.28,
            sampling_weights=top * w.weights("token_truncate", 3.0, None),
        ),
    ),
    "reinforce": (
        {"type": "reinforce"},
        lambda w, top: reinforce_loss(
            w.now,
            w.advantages,
            w.mask,
            sampling_weights=top,
            aggregation="dapo",
            normalizer=w.tokens,
        ),
    ),
}


def chosen(function: Any, w: Any, top: torch.Tensor, **options: Any) -> Any:
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    options |= {"sampling_weights": top, **clips}
    return ratio(function, w, reference_logprobs=w.reference, **options)


@pytest.mark.parametrize("budget", [10_000, 64])
@pytest.mark.parametrize("name", TOP)
def test_the_policy_gradient_may_be_of_the_most_uncertain_tokens_of_the_step_alone(
    step_of: Callable[..., Any], rng: random.Random, name: str, budget: int
) -> None:
    loss, function = TOP[name]
    asked = {**loss, "top_entropy_quantile": 0.3}
    model, frozen, step = step_of(asked, budget=budget, temperature=0.8)
    batch = batch_of(model, rng)
    w = whole(model, frozen, batch, 0.8)
    rows = [
        token_entropies(model(input_ids=torch.tensor([sample.ids])).logits[0, :-1], 0.8)
        for sample in batch.samples
    ]
    top = high_entropy_mask(pad_sequence(rows, batch_first=True), w.mask, 0.3)
    assert 0.2 < float(top.sum() / w.mask.sum()) < 0.4
    expected = function(w, top.float()).loss
    gradients = gradients_of(expected, model)
    found = step.run(batch, None)
    assert found["loss/policy"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert_gradients_are(gradients, model)


@pytest.mark.parametrize("name", repeated(CASES, 12))
def test_how_a_step_is_split_changes_neither_its_figures_nor_its_weights(
    step_of: Callable[..., Any], rng: random.Random, name: str
) -> None:
    loss, _ = CASES[name]
    (model, _, together), (other, _, split) = step_of(loss), step_of(loss, budget=64)
    batch = batch_of(model, rng)
    expected = numbers(together.run(batch, None))
    assert numbers(split.run(batch, None)) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_gradients_are([weights.grad for weights in model.parameters()], other)
    # Adam's first update has the size of the rate, also where a gradient is nothing but rounding.
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        clear = one.grad.abs() > 1e-4 * one.grad.abs().max()
        assert clear.float().mean() > 0.5
        assert float((one - two).detach()[clear].abs().max()) < 0.1 * RATE


def numbers(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


@pytest.mark.parametrize("name", ["grpo kl", "prime_rl", "decoupled_ppo", "reinforce"])
def test_log_probs_are_at_the_temperature_of_the_generator(
    step_of: Callable[..., Any], rng: random.Random, name: str
) -> None:
    loss, function = CASES[name]
    model, frozen, step = step_of(loss, temperature=0.9)
    batch = batch_of(model, rng)
    cold, plain = (function(whole(model, frozen, batch, t)).loss.item() for t in (0.9, 1.0))
    found = step.run(batch, None)["loss/policy"]
    assert found == pytest.approx(cold, rel=1e-4, abs=1e-5)
    assert found != pytest.approx(plain, rel=1e-3)


PLAIN = ["grpo", "cispo", "sapo", "gmpo", "vespo", "prime_rl", "prime_rl_ipo", "dppo"]


PLAIN += ["decoupled_ppo", "reinforce"]


@pytest.mark.parametrize("kind", PLAIN)
def test_a_loss_without_a_kl_needs_no_reference(build_config: Any, kind: str) -> None:
    assert not build_config(loss={"type": kind}).loss.needs_reference


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("grpo", "kl_beta"),
        ("cispo", "kl_beta"),
        ("sapo", "kl_beta"),
        ("prime_rl", "teacher_tau"),
    ],
)
def test_a_kl_without_a_reference_is_refused_before_the_first_step(
    build_config: Any, build_model: Any, kind: str, key: str
) -> None:
    config = build_config(loss={"type": kind, key: 0.1})
    assert config.loss.needs_reference
    with pytest.raises(ValueError, match=f"loss '{kind}' needs a reference model: load one"):
        OptimizerStep(build_model(1), None, config)


def test_a_reference_that_the_loss_does_not_read_is_never_run(
    build_config: Any, build_model: Any, rng: random.Random
) -> None:
    model, reference = build_model(1), build_model(2)
    runs = []
    reference.register_forward_hook(lambda *_: runs.append("whole"))
    reference.base_model.register_forward_hook(lambda *_: runs.append("decoder"))
    batch = batch_of(model, rng)
    OptimizerStep(model, reference, build_config()).run(batch, None)
    assert runs == []
    OptimizerStep(model, reference, build_config(loss={"kl_beta": 0.1})).run(batch, None)
    assert runs == ["decoder"]


Build = Callable[..., Any]


@pytest.fixture
def step_of_turns(build_config: Any, build_model: Any) -> Build:
    def build(loss: dict[str, Any], **trainer: Any) -> Any:
        trainer = {"lr": RATE, "grad_clip": 1e9, "microbatch_tokens": 150, **trainer}
        config = build_config(**NARROW, trainer=trainer, loss=loss)
        model, frozen = build_model(1), nearby(build_model(1)).requires_grad_(False)
        reference = frozen if config.loss.needs_reference else None
        return model, OptimizerStep(model, reference, config), config

    return build


def by_id(sample: PolicySample) -> PolicySample:
    """The sample with its advantage written for each of its ids."""
    assert not isinstance(sample.advantage, list)
    return replace(sample, advantage=[sample.advantage * own for own in sample.mask])


@pytest.mark.parametrize(("name", "packing"), [*zip(CASES, cycle([False, True]))])
def test_equal_advantages_of_all_turns_train_as_one_of_the_rollout(
    step_of_turns: Build, rng: random.Random, name: str, packing: bool
) -> None:
    model, one, config = step_of_turns(CASES[name][0], packing=packing)
    other_model, other, _ = step_of_turns(CASES[name][0], packing=packing)
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
    step_of_turns: Build, rng: random.Random, packing: bool
) -> None:
    model, step, _ = step_of_turns({"type": "reinforce"}, packing=packing)
    batch, pairs = turns_of(model, rng)
    expected = expected_loss(model, pairs, batch.action_tokens)
    gradients = gradients_of(expected, model)
    found = step.run(batch, None)
    assert found["loss/policy"] == pytest.approx(expected.item(), rel=1e-4)
    assert_gradients_are(gradients, model)


def test_the_shares_of_two_ranks_add_up_to_the_gradient_of_the_step(
    step_of_turns: Build, rng: random.Random
) -> None:
    model, whole, _ = step_of_turns({"type": "reinforce"})
    batch, _ = turns_of(model, rng)
    whole.run(batch, None)
    gradients = [weights.grad.clone() for weights in model.parameters()]
    sums = [torch.zeros_like(gradient) for gradient in gradients]
    for plan in plan_step(batch, 150, 2):
        other, step, _ = step_of_turns({"type": "reinforce"})
        own = [batch.samples[place] for one in plan.microbatches for place in one.samples]
        tokens = batch.action_tokens - sum(sum(sample.mask) for sample in own)
        elsewhere = Skipped(batch.sequences - len(own), tokens)
        step.run(replace(batch, samples=own, skipped=elsewhere), None)
        sums = [one + weights.grad for one, weights in zip(sums, other.parameters(), strict=True)]
    for total, gradient in zip(sums, gradients, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-3, atol=1e-6)


def test_a_custom_loss_reads_the_advantage_of_each_token(
    step_of_turns: Build, write_module: Callable[[str, str], None], rng: random.Random
) -> None:
    write_module(
        "users_turns",
        "from composer_mesh import LossInputs, LossOutputs\n\n\n"
        "def loss(inputs: LossInputs) -> LossOutputs:\n"
        "    terms = inputs.advantages * inputs.trainer_logprobs\n"
        "    return LossOutputs(loss=-terms[inputs.loss_mask].sum())\n",
    )
    model, step, _ = step_of_turns({"type": "custom", "import_path": "users_turns.loss"})
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

"""A loss of the user's own in the trainer: PRIME-RL's convention, its metrics, its mistakes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from step_batches import (
    NARROW,
    assert_gradients_are,
    batch_of,
    gradients_of,
    largest_change,
    nearby,
    own_logprobs,
    weights_of,
)

from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.losses.custom import CustomFunctionError

USERS_MODULE = '''
import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs


def trust_region(inputs: LossInputs, low=0.2, high=0.2, tau=1.0, kl=1e-3) -> LossOutputs:
    """What PRIME-RL does by default, in a user's own words."""
    mask, advantages = inputs.loss_mask, inputs.advantages
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    moved = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
    outside = torch.where(advantages > 0, moved > high, moved < -low)
    gain = (mask & ~outside) * tau * advantages * log_ratio.exp()
    loss = (kl * mask * log_ratio.square() - gain).sum()
    return LossOutputs(
        loss=loss,
        metrics={"tokens": mask.sum(), "outside": outside[mask].float(), "always": 2},
    )


def to_reference(inputs: LossInputs) -> LossOutputs:
    gap = inputs.trainer_logprobs - inputs.ref_logprobs
    assert inputs.teacher_logprobs is inputs.ref_logprobs
    return LossOutputs(loss=gap[inputs.loss_mask].square().sum(), metrics={})


def without_reference(inputs: LossInputs) -> LossOutputs:
    assert inputs.ref_logprobs is None
    return LossOutputs(loss=inputs.trainer_logprobs[inputs.loss_mask].sum(), metrics={})


def lost(inputs: LossInputs, at: float) -> LossOutputs:
    loss = inputs.trainer_logprobs[inputs.loss_mask].sum()
    spoiled = loss * float("nan") if inputs.advantages[0] == at else loss
    return LossOutputs(loss=spoiled, metrics={})
'''
OPTIONS = {"low": 1e-4, "high": 2e-4, "tau": 0.5, "kl": 0.1}


def custom(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "custom", "import_path": f"users_losses.{name}", **options}


@pytest.fixture
def step_of(
    build_config: Any, build_model: Any, write_module: Callable[[str, str], None]
) -> Callable[..., Any]:
    """Model, reference and step for a loss; a microbatch holds two or three sequences."""
    write_module("users_losses", USERS_MODULE)

    def build(loss: dict[str, Any], budget: int = 64) -> Any:
        trainer = {"lr": 1e-3, "grad_clip": 1e9, "microbatch_tokens": budget}
        config = build_config(**NARROW, trainer=trainer, loss=loss)
        model, frozen = build_model(1), nearby(build_model(1)).requires_grad_(False)
        reference = frozen if config.loss.needs_reference else None
        return model, frozen, OptimizerStep(model, reference, config)

    return build


def test_a_loss_written_for_prime_rl_trains_as_the_built_in_one(
    step_of: Callable[..., Any], rng: random.Random
) -> None:
    names = {"mask_low": "low", "mask_high": "high", "adv_tau": "tau", "kl_tau": "kl"}
    options = {theirs: OPTIONS[own] for theirs, own in names.items()}
    built_in_model, _, built_in = step_of({"type": "prime_rl", **options})
    model, _, own = step_of(custom("trust_region", kwargs=OPTIONS))
    batch = batch_of(model, rng)
    found, expected = own.run(batch, None), built_in.run(batch, None)
    for name in ("loss/policy", "loss/total", "policy/grad_norm", "logprob_mismatch/kl_k3"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert found["policy/custom/outside"] == pytest.approx(expected["policy/clipped_fraction"])
    assert found["policy/custom/outside"] > 0
    assert largest_change(weights_of(built_in_model), weights_of(model)) < 1e-6


@pytest.mark.parametrize("budget", [64, 150, 10_000])
def test_metrics_are_means_over_the_whole_step_however_it_is_split(
    step_of: Callable[..., Any], rng: random.Random, budget: int
) -> None:
    model, _, step = step_of(custom("trust_region"), budget)
    for batch in (batch_of(model, rng, samples=count) for count in (7, 3)):
        found = step.run(batch, None)
        mean = batch.action_tokens / len(batch.samples)
        assert found["policy/custom/tokens"] == pytest.approx(mean)
        assert found["policy/custom/always"] == 2


@pytest.mark.parametrize("budget", [64, 10_000])
def test_a_loss_may_read_the_frozen_initial_policy(
    step_of: Callable[..., Any], rng: random.Random, budget: int
) -> None:
    model, frozen, step = step_of(custom("to_reference", reference=True), budget)
    batch = batch_of(model, rng)
    expected = torch.zeros(())
    for sample in batch.samples:
        gap = own_logprobs(model, sample.ids) - own_logprobs(frozen, sample.ids).detach()
        expected = expected + gap[torch.tensor(sample.mask)[1:]].square().sum()
    expected = expected / batch.action_tokens
    gradients = gradients_of(expected, model)
    assert step.run(batch, None)["loss/policy"] == pytest.approx(expected.item(), rel=1e-4)
    assert_gradients_are(gradients, model)


def test_without_reference_true_none_is_loaded_and_none_is_shown(
    step_of: Callable[..., Any], build_config: Any, build_model: Any, rng: random.Random
) -> None:
    model, _, step = step_of(custom("without_reference"))
    assert step.run(batch_of(model, rng), None)["loss/policy"] < 0
    config = build_config(loss=custom("to_reference", reference=True))
    assert config.loss.needs_reference
    with pytest.raises(ValueError, match="loss 'custom' needs a reference model: load one"):
        OptimizerStep(build_model(1), None, config)


@pytest.mark.parametrize("place", [0, 3, 5])
@pytest.mark.parametrize("budget", [64, 10_000])
def test_a_nan_names_function_and_trace_and_changes_no_weight(
    step_of: Callable[..., Any], rng: random.Random, budget: int, place: int
) -> None:
    model, _, step = step_of(custom("lost", kwargs={"at": 0.5}), budget)
    batch = batch_of(model, rng)
    samples = list(batch.samples)
    samples[place] = replace(samples[place], advantage=0.5)
    before = weights_of(model)
    with pytest.raises(CustomFunctionError, match="its loss is nan but must be finite") as error:
        step.run(replace(batch, samples=samples), None)
    assert error.value.function == "users_losses.lost"
    assert f"(t{place})" in error.value.place
    assert largest_change(before, weights_of(model)) == 0
    assert step.run(batch, None)["loss/policy"] is not None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (custom("absent"), "users_losses.absent"),
        (custom("lost"), "missing a required argument: 'at'"),
        (custom("trust_region", kwargs={"lo": 0.1}), "lo=0.1"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_the_config(
    step_of: Callable[..., Any], loss: dict[str, Any], message: str
) -> None:
    with pytest.raises(CustomFunctionError, match=message):
        step_of(loss)


NEEDY_MODULE = """
from composer_mesh.losses.custom import LossInputs, LossOutputs, loss_needs


@loss_needs("entropies", "logits", "hidden_states")
def needy(inputs: LossInputs, entropy=0.3, flat=0.1, norm=0.01) -> LossOutputs:
    mask = inputs.loss_mask
    sampled = int(mask.sum())
    assert inputs.entropies.shape == (sampled,)
    assert inputs.logits.shape[0] == inputs.hidden_states.shape[0] == sampled
    gain = (inputs.advantages * inputs.trainer_logprobs)[mask].sum()
    spread = inputs.logits.var(-1).sum()
    loss = flat * spread + norm * inputs.hidden_states.square().sum() - gain
    loss = loss - entropy * inputs.entropies.sum()
    return LossOutputs(loss=loss, metrics={"entropy": inputs.entropies})


@loss_needs("entropies")
def entropies_only(inputs: LossInputs) -> LossOutputs:
    assert inputs.logits is None
    assert inputs.hidden_states is None
    return LossOutputs(loss=-inputs.entropies.sum())


def undeclared(inputs: LossInputs) -> LossOutputs:
    assert inputs.entropies is None
    return LossOutputs(loss=-inputs.trainer_logprobs[inputs.loss_mask].sum())
"""
ALL = ["entropies", "hidden_states", "logits"]


def whole_fields(model: Any, ids: list[int], temperature: float) -> tuple[Any, Any]:
    """Hidden states and tempered logits at each next id, by transformers' own forward."""
    found = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return found.hidden_states[-1][0, :-1], found.logits[0, :-1] / temperature


@pytest.mark.parametrize("budget", [64, 10_000])
def test_a_loss_gets_entropies_logits_and_hidden_states_with_their_gradients(
    step_of: Callable[..., Any],
    write_module: Callable[[str, str], None],
    rng: random.Random,
    budget: int,
) -> None:
    """Also in microbatches, which add up to the loss of the batch."""
    write_module("users_needs", NEEDY_MODULE)
    loss = {"type": "custom", "import_path": "users_needs.needy", "needs": ALL}
    model, _, step = step_of(loss, budget)
    batch = batch_of(model, rng)
    expected, entropies = torch.zeros(()), []
    for sample in batch.samples:
        mask = torch.tensor(sample.mask)[1:]
        hidden, logits = whole_fields(model, sample.ids, 1.0)
        logprobs = logits.log_softmax(-1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1)[mask])
        chosen = logprobs.gather(-1, torch.tensor(sample.ids)[1:, None])[:, 0][mask]
        terms = 0.1 * logits[mask].var(-1).sum() + 0.01 * hidden[mask].square().sum()
        expected = expected + terms - sample.advantage * chosen.sum() - 0.3 * entropies[-1].sum()
    expected = expected / batch.action_tokens
    gradients = gradients_of(expected, model)
    metrics = step.run(batch, None)
    assert metrics["loss/policy"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["policy/custom/entropy"] == pytest.approx(
        float(torch.cat(entropies).detach().mean()), rel=1e-4
    )
    assert_gradients_are(gradients, model)


def test_only_what_a_loss_asks_for_is_computed(
    step_of: Callable[..., Any], write_module: Callable[[str, str], None], rng: random.Random
) -> None:
    write_module("users_needs", NEEDY_MODULE)
    for name, needs in (("entropies_only", ["entropies"]), ("undeclared", [])):
        loss = {"type": "custom", "import_path": f"users_needs.{name}", "needs": needs}
        model, _, step = step_of(loss)
        assert step.run(batch_of(model, rng), None)["loss/policy"] is not None


def test_needs_that_the_config_does_not_name_are_refused_before_a_step(
    step_of: Callable[..., Any], write_module: Callable[[str, str], None]
) -> None:
    write_module("users_needs", NEEDY_MODULE)
    told = r'needs logits, hidden_states but loss.needs is \[.entropies.\].*set loss.needs to \["'
    loss = {"type": "custom", "import_path": "users_needs.needy", "needs": ["entropies"]}
    with pytest.raises(CustomFunctionError, match=told):
        step_of(loss)

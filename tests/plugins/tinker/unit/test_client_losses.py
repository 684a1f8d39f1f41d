"""Losses that clients name: definitions, gradients, masks, and agreement with the trainer's own.

The three-channel step of a client is the trainer's: losses, gradients, weights of 5 steps.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from step_batches import Make, batch_of
from three_channel_steps import ON, TopKTeacher, client_step
from torch import Tensor

from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.losses.grpo import grpo_loss
from composer_mesh.plugins.tinker.client.sequences import (
    Hinted,
    Pair,
    Rollout,
    TeacherTopK,
    ThreeChannelStep,
    Turn,
    three_channel_arrays,
)
from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer
from composer_mesh.plugins.tinker.models.messages import AdamParams, Datum, ModelSpec, TrainCall
from composer_mesh.plugins.tinker.models.trained_weights import FullWeights
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import StepBatch

MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


def make_inputs(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(2, 6, generator=generator) * 2
    old = logprobs + torch.randn(2, 6, generator=generator) * 0.4
    advantages = torch.randn(2, 6, generator=generator)
    inputs = {"logprobs": old * MASK, "advantages": advantages * MASK}
    return logprobs.requires_grad_(), inputs


def total(name: str, logprobs: Tensor, inputs: dict[str, Tensor], **options: float) -> Tensor:
    return CLIENT_LOSSES[name].total(logprobs, inputs, options, MASK)[0]


def gradient(name: str, *args: Any, **options: float) -> Tensor:
    logprobs, inputs = args
    (found,) = torch.autograd.grad(total(name, logprobs, inputs, **options), logprobs)
    return found


@pytest.mark.parametrize("name", sorted({*CLIENT_LOSSES} - {"three_channel"}))
def test_nothing_outside_of_the_mask_counts(name: str) -> None:
    logprobs, inputs = make_inputs()
    inputs["weights"] = inputs["advantages"]
    other = torch.where(MASK, logprobs.detach(), -9.0).requires_grad_()
    assert torch.equal(total(name, logprobs, inputs), total(name, other, inputs))
    assert not gradient(name, logprobs, inputs)[~MASK].any()


def test_cross_entropy_backpropagates_a_loss_that_the_client_computed() -> None:
    logprobs, _ = make_inputs()
    wanted = torch.autograd.grad((logprobs.exp() * MASK).square().sum(), logprobs)[0]
    assert torch.allclose(gradient("cross_entropy", logprobs, {"weights": -wanted}), wanted)


def test_ppo_is_the_trainers_surrogate_summed() -> None:
    logprobs, inputs = make_inputs()
    own = grpo_loss(
        logprobs,
        inputs["logprobs"],
        inputs["advantages"],
        MASK,
        clip_low=0.2,
        clip_high=0.2,
        normalizer=1.0,
    ).loss
    torch.testing.assert_close(total("ppo", logprobs, inputs), own)
    torch.testing.assert_close(
        gradient("ppo", logprobs, inputs), torch.autograd.grad(own, logprobs)[0]
    )


def test_importance_sampling_and_ppo_agree_where_nothing_is_clipped() -> None:
    logprobs, inputs = make_inputs()
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    torch.testing.assert_close(
        gradient("importance_sampling", logprobs, inputs),
        gradient("ppo", logprobs, inputs, **wide),
    )


def test_cispo_weighs_each_logprob_by_a_constant_clipped_ratio() -> None:
    logprobs, inputs = make_inputs()
    ratio = (logprobs - inputs["logprobs"]).exp().clamp(0.8, 1.2).detach()
    expected = -(ratio * inputs["advantages"]) * MASK
    torch.testing.assert_close(gradient("cispo", logprobs, inputs), expected)


def test_gspo_has_one_ratio_for_a_sequence() -> None:
    logprobs, inputs = make_inputs()
    own = MASK & (inputs["advantages"] != 0)
    log_ratio = ((logprobs - inputs["logprobs"]) * own).sum(1, keepdim=True) / own.sum(1)[:, None]
    ratio, advantages = log_ratio.exp().detach(), inputs["advantages"]
    unclipped = (ratio * advantages) <= (ratio.clamp(0.8, 1.2) * advantages)
    expected = torch.where(unclipped & own, -ratio * advantages, 0.0)
    torch.testing.assert_close(gradient("gspo", logprobs, inputs), expected)


def test_dro_is_regression_of_the_log_ratio_to_advantages() -> None:
    logprobs, inputs = make_inputs()
    log_ratio = (logprobs - inputs["logprobs"]).detach()
    expected = -(inputs["advantages"] - 0.3 * log_ratio) * MASK
    torch.testing.assert_close(gradient("dro", logprobs, inputs, beta=0.3), expected)


def test_bounds_of_each_token_come_before_those_of_the_call() -> None:
    logprobs, inputs = make_inputs()
    per_token = dict(inputs)
    per_token["clip_low_threshold"] = torch.full((2, 6), 0.9)
    per_token["clip_high_threshold"] = torch.full((2, 6), 1.05)
    asked = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
    other = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    assert torch.equal(
        gradient("ppo", logprobs, per_token, **other), gradient("ppo", logprobs, inputs, **asked)
    )


def data_of(step: ThreeChannelStep) -> tuple[Datum, ...]:
    return tuple(Datum(one.tokens, one.inputs) for one in three_channel_arrays(step))


@pytest.mark.parametrize("most_tokens", [100_000, 200])
def test_five_steps_of_a_client_are_those_of_the_trainer(
    make: Make, build_model: Any, rng: random.Random, most_tokens: int
) -> None:
    trainer = {"lr": 3e-4, "grad_clip": 0.05, "microbatch_tokens": 100_000}
    model, step = make(4, **ON, trainer=trainer)
    reference, teacher_model, base = build_model(4), build_model(2), build_model(4)
    clients = ClientTrainer(base, FullWeights(base, Ranks()), most_tokens, 1)
    clients.open("own", ModelSpec(rank=0), None)
    adam = AdamParams(learning_rate=3e-4, eps=1e-8, grad_clip_norm=0.05)
    for number in range(5):
        batch = batch_of(reference, rng, samples=6, pairs=4)
        batch = StepBatch(number, batch.samples, batch.views, batch.pairs)
        teacher = TopKTeacher(teacher_model, batch.views)
        own = client_step(batch, teacher, reference)
        call = TrainCall(
            "own", 2 * number, "forward_backward", data_of(own), "three_channel", own.options
        )
        (found,) = clients.execute([call])
        assert not found.error
        gradient = clients.models["own"].gradient
        (stepped,) = clients.execute([TrainCall("own", 2 * number + 1, "optim_step", adam=adam)])
        expected = step.run(batch, teacher)
        assert stepped.metrics["grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-5)
        assert found.metrics["loss:sum"] == pytest.approx(expected["loss/total"], abs=1e-5)
        for name in ("policy", "sdpo", "replay"):
            assert expected[f"loss/{name}"] is not None
            assert found.metrics[f"loss/{name}:sum"] == pytest.approx(
                expected[f"loss/{name}"], abs=1e-5
            )
        assert gradient is not None
        clipped = min(1.0, 0.05 / float(gradient.norm()))
        theirs = torch.cat([one.grad.reshape(-1) for one in model.parameters()])
        assert float((gradient * clipped - theirs).abs().max()) < 1e-5
    numbers = clients.models["own"].weights.detach()
    trained = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    assert float((numbers - trained).abs().max()) < 1e-5
    begun = torch.cat([one.detach().reshape(-1) for one in reference.parameters()])
    assert float((begun - trained).abs().max()) > 5e-4


def test_a_channel_without_data_is_not_reported(make: Make, build_model: Any) -> None:
    base = build_model(4)
    clients = ClientTrainer(base, FullWeights(base, Ranks()), 4096, 1)
    clients.open("own", ModelSpec(rank=0), None)
    rollout = Rollout([Turn([5, 6], [7, 8], [-1.0, -2.0])], 1.0)
    step = ThreeChannelStep([rollout])
    call = TrainCall("own", 0, "forward", data_of(step), "three_channel", step.options)
    (found,) = clients.execute([call])
    assert set(found.metrics) == {"loss:sum", "loss/policy:sum"}


def test_a_step_without_what_it_needs_is_refused() -> None:
    rollout = Rollout([Turn([5, 6], [7, 8], [-1.0, -2.0])], 1.0)
    view = HintedView("", 0, [5, 9, 6, 7, 8], [1, 2], [2, 3], [7, 8])
    with pytest.raises(ValueError, match="no ids of a teacher"):
        ThreeChannelStep([rollout], [Hinted(rollout, view)])
    few = TeacherTopK(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="1 rows for an answer of 2 ids"):
        ThreeChannelStep([rollout], [Hinted(rollout, view, few)])
    with pytest.raises(ValueError, match="see `with_reference`"):
        ThreeChannelStep([rollout], pairs=[Pair([1], [2], [3])])
    with pytest.raises(ValueError, match="2 ids and 1 log-probs"):
        Turn([1], [2, 3], [-1.0])

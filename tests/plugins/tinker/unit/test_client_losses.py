"""Losses that clients name: definitions, gradients, masks, and agreement with the trainer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.grpo import grpo_loss
from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES

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

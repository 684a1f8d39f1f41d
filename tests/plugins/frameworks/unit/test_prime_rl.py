"""Our losses as PRIME-RL calls them, on objects with its fields; docs/prime-rl.md."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guides import Guide

from composer_mesh.losses import custom_function
from composer_mesh.losses.jsd import sampled_reverse_kl
from composer_mesh.losses.policy import grpo_loss, prime_rl_loss
from composer_mesh.plugins.frameworks import prime_rl
from composer_mesh.plugins.frameworks.prime_rl import TYPES, loss_fn, policy_loss, sdpo_loss

RECORDED = json.loads((Path(__file__).parent / "recorded" / "prime_rl.json").read_text())
FIELDS = RECORDED["fields"]["LossInputs"]


def inputs(seed: int = 0, **changes: Any) -> Any:
    """A sequence with PRIME-RL's fields and no other."""
    generator = torch.Generator().manual_seed(seed)
    now = -3 * torch.rand(9, generator=generator)
    values: dict[str, Any] = {
        "trainer_logprobs": now.requires_grad_(),
        "inference_logprobs": now.detach() + 0.3 * torch.randn(9, generator=generator),
        "ref_logprobs": now.detach() + 0.3 * torch.randn(9, generator=generator),
        "advantages": torch.randn(9, generator=generator),
        "loss_mask": torch.arange(9) > 2,
        "loss_weights": None,
        **changes,
    }
    assert list(values) == FIELDS
    return SimpleNamespace(**values)


def test_our_types_have_its_fields_in_its_order() -> None:
    own = [field.name for field in dataclasses.fields(custom_function.LossInputs)]
    assert own[: len(FIELDS)] == FIELDS
    outputs = [field.name for field in dataclasses.fields(custom_function.LossOutputs)]
    assert outputs == RECORDED["fields"]["LossOutputs"]


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_a_sum_over_the_tokens_with_a_gradient(kind: str) -> None:
    one = inputs()
    found = policy_loss(one, type=kind)
    assert found.loss.shape == ()
    (gradient,) = torch.autograd.grad(found.loss, one.trainer_logprobs)
    assert gradient[one.loss_mask].any()
    assert not gradient[~one.loss_mask].any()
    assert all(value.dim() == 0 and not value.requires_grad for value in found.metrics.values())


def test_a_loss_is_ours_with_its_options() -> None:
    one = inputs()
    found = policy_loss(one, type="grpo", clip_high=0.05, kl_beta=0.1)
    ours = grpo_loss(
        one.trainer_logprobs, one.inference_logprobs, one.advantages, one.loss_mask,
        normalizer=1, clip_high=0.05, kl_beta=0.1, reference_logprobs=one.ref_logprobs,
    )  # fmt: skip
    assert found.loss.item() == ours.loss.item()
    weighted = policy_loss(inputs(loss_weights=torch.full((9,), 2.0)), type="reinforce")
    assert weighted.loss.item() == pytest.approx(2 * policy_loss(one, type="reinforce").loss.item())


def test_the_sampled_sdpo_term_is_added_and_off_without_a_teacher() -> None:
    one = inputs()
    policy = prime_rl_loss(
        one.trainer_logprobs, one.inference_logprobs, one.advantages, one.loss_mask, normalizer=1
    ).loss
    term = sampled_reverse_kl(one.trainer_logprobs, one.ref_logprobs, one.loss_mask, normalizer=1)
    found = loss_fn(one, alpha_sdpo=0.5)
    assert found.loss.item() == pytest.approx((policy + 0.5 * term).item(), abs=1e-6)
    assert found.metrics["sdpo"].item() == pytest.approx(term.item() / 6, abs=1e-6)
    alone = sdpo_loss(inputs(ref_logprobs=None), alpha=0.5)
    assert alone.loss.item() == pytest.approx(policy.item(), abs=1e-6)
    assert "sdpo" not in alone.metrics


def test_what_it_cannot_host_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batches have no pairs"):
        loss_fn(inputs(), beta_dpo=0.1)
    with pytest.raises(ValueError, match="type is 'ppo'"):
        policy_loss(inputs(), type="ppo")
    with pytest.raises(ValueError, match="divides by the tokens of the step"):
        policy_loss(inputs(), aggregation="grpo")
    with pytest.raises(ValueError, match="alpha is -1"):
        sdpo_loss(inputs(), alpha=-1)


PAGE = Guide.read("prime-rl.md")


def test_the_python_of_the_page_runs_and_every_type_is_named() -> None:
    found: dict[str, Any] = {}
    for block in PAGE.blocks("python"):
        exec(block, found)
    assert found["sequence"].trainer_logprobs.grad.any()
    for name in (*prime_rl.TYPES, "policy_loss", "sdpo_loss", "loss_fn"):
        assert f"`{name}`" in PAGE.text, name

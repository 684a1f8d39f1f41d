"""What holds for every policy loss, whatever its formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from repetition import repeated
from torch import Tensor

from composer_mesh.losses import policy
from composer_mesh.losses.policy import (
    PolicyLoss,
    Rejection,
    aggregate,
    cispo_loss,
    decoupled_ppo_loss,
    dppo_loss,
    gmpo_loss,
    grpo_loss,
    off_policy_weights,
    prime_rl_ipo_loss,
    prime_rl_loss,
    reinforce_loss,
    sampling_weights,
    sapo_loss,
    vespo_loss,
)

Batch = dict[str, Tensor]
Loss = Callable[..., PolicyLoss]
KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
OTHERS = ("old", "sampling", "reference", "advantages", "weights")


def batch(rows: int = 3, tokens: int = 5, seed: int = 0, scale: float = 0.5) -> Batch:
    """Four policies' log-probs, advantages, weights and a mask with an empty row, in float64."""
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    common = -0.1 - 2 * uniform(rows, tokens)
    found = {
        name: common * (1 - scale + 2 * scale * uniform(rows, tokens))
        for name in ("logprobs", "old", "sampling", "reference")
    }
    found["advantages"] = torch.randn(rows, generator=rng, dtype=torch.float64)
    found["weights"] = uniform(rows, tokens)
    found["mask"] = torch.rand(rows, tokens, generator=rng) < 0.7
    found["mask"][:1] = False
    found["logprobs"].requires_grad_()
    return found


def loss_of(
    function: Callable[..., PolicyLoss], *arguments: str, tensors: str = "", **options: Any
) -> Loss:
    """A loss of a batch's named tensors; `tensors` are options, "reference_logprobs=reference"."""
    named = [pair.split("=") for pair in tensors.split()]

    def call(b: Batch, normalizer: float | None, **more: Any) -> PolicyLoss:
        given = {key: b[name] for key, name in named}
        values = [b[name] for name in arguments]
        return function(*values, normalizer=normalizer, **given, **options, **more)

    return call


def against(function: Callable[..., PolicyLoss], past: str, tensors: str = "", **o: Any) -> Loss:
    return loss_of(function, "logprobs", past, "advantages", "mask", tensors=tensors, **o)


def family(function: Callable[..., PolicyLoss], **options: Any) -> Loss:
    """One of the GRPO family with all that multiplies and adds to its terms."""
    tensors = "reference_logprobs=reference sampling_weights=weights"
    return against(function, "old", tensors, kl_beta=0.1, **options)


def decoupled(**options: Any) -> Loss:
    arguments = ("logprobs", "old", "sampling", "advantages", "mask")
    return loss_of(decoupled_ppo_loss, *arguments, **options)


WEIGHTS = "sampling_weights=weights"
PER_SEQUENCE: dict[str, Loss] = {
    "gspo": family(grpo_loss, aggregation="grpo", ratio_level="sequence", kl_importance=True),
    "luspo": family(grpo_loss, aggregation="luspo", ratio_level="sequence"),
    "gmpo": against(gmpo_loss, "old", WEIGHTS),
    "vespo": against(vespo_loss, "old", WEIGHTS),
}
LOSSES: dict[str, Loss] = {
    **PER_SEQUENCE,
    **{f"grpo {kind}": family(grpo_loss, aggregation=kind, ratio_cap=1.5) for kind in KINDS},
    "gspo token": family(grpo_loss, aggregation="grpo", ratio_level="sequence_token"),
    "cispo": family(cispo_loss, clip_high=0.5, kl_estimator="k2"),
    "sapo": family(sapo_loss, kl_importance=True, kl_estimator="low_var_kl"),
    "sapo sequence": family(sapo_loss, ratio_level="sequence", kl_estimator="abs"),
    "prime-rl": against(prime_rl_loss, "sampling", WEIGHTS),
    "prime-rl teacher": against(
        prime_rl_loss, "sampling", "reference_logprobs=reference", teacher_tau=0.5
    ),
    "prime-rl ipo": against(prime_rl_ipo_loss, "sampling"),
    "dppo tv": against(dppo_loss, "sampling"),
    "dppo kl": against(dppo_loss, "sampling", WEIGHTS, divergence="kl", aggregation="grpo"),
    "dppo recomputed": against(dppo_loss, "sampling", "old_logprobs=old", threshold=0.05),
    "dppo ratio": against(dppo_loss, "sampling", "old_logprobs=old", divergence="ratio"),
    "ppo": decoupled(dual_clip=1.5),
    "decoupled cap": decoupled(rejection=Rejection(upper=1.5)),
    "decoupled clamp": decoupled(rejection=Rejection(action="clamp", upper=1.2), dual_clip=3),
    "decoupled gspo": decoupled(
        rejection=Rejection("sequence", "mask", "kl_k3", "max", 2.0), ratio_level="sequence"
    ),
    "reinforce": loss_of(reinforce_loss, "logprobs", "advantages", "mask", tensors=WEIGHTS),
}
AGGREGATIONS = {
    "gspo": "grpo",
    "luspo": "luspo",
    "gmpo": "grpo",
    **{f"grpo {kind}": kind for kind in KINDS},
    "gspo token": "grpo",
    "sapo": "grpo",
    "sapo sequence": "grpo",
    "dppo kl": "grpo",
}
"""Of the losses above whose aggregation is not "dapo"."""
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def rows_of(b: Batch, rows: slice | Tensor) -> Batch:
    return {name: values[rows] for name, values in b.items()}


def figures(found: PolicyLoss) -> dict[str, Tensor]:
    return {name: value for name, value in vars(found).items() if value is not None}


def gradient(found: PolicyLoss, b: Batch) -> Tensor:
    return torch.autograd.grad(found.loss, b["logprobs"])[0]


@pytest.mark.parametrize("name", LOSSES)
def test_the_unreduced_form_aggregates_to_the_loss_and_its_figures(name: str) -> None:
    b, kind = batch(rows=5, seed=8), AGGREGATIONS.get(name, "dapo")
    whole, terms = LOSSES[name](b, 7), LOSSES[name](b, None, reduction="none")
    assert figures(terms).keys() == figures(whole).keys()
    for key, value in figures(terms).items():
        assert value.shape == b["mask"].shape
        assert not value[~b["mask"]].any()
        total = aggregate(value, b["mask"], kind, 7)
        torch.testing.assert_close(total, figures(whole)[key], rtol=1e-12, atol=1e-14)
    (slope,) = torch.autograd.grad(aggregate(terms.loss, b["mask"], kind, 7), b["logprobs"])
    torch.testing.assert_close(slope, gradient(whole, b), rtol=1e-12, atol=1e-14)


@every_loss
def test_a_sum_without_its_normalizer_is_refused_with_the_repair(loss: Loss) -> None:
    with pytest.raises(ValueError, match="normalizer is None but reduction 'sum' divides by it"):
        loss(batch(), None)


@every_loss
@given(split=st.integers(0, 5), seed=st.integers(0, 2**16))
@settings(max_examples=6, deadline=None)
def test_losses_of_microbatches_and_ranks_add_up_to_the_batch_loss(
    loss: Loss, split: int, seed: int
) -> None:
    b = batch(rows=5, seed=seed)
    whole = figures(loss(b, 7))
    first = figures(loss(rows_of(b, slice(split)), 7))
    second = figures(loss(rows_of(b, slice(split, None)), 7))
    for name, value in whole.items():
        torch.testing.assert_close(first[name] + second[name], value, rtol=1e-12, atol=1e-14)


@every_loss
def test_the_order_of_the_sequences_does_not_matter(loss: Loss) -> None:
    b, order = batch(rows=6), torch.tensor([3, 1, 5, 0, 2, 4])
    found, shuffled = loss(b, 7), loss(rows_of(b, order), 7)
    for name, value in figures(found).items():
        torch.testing.assert_close(figures(shuffled)[name], value, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient(shuffled, b), gradient(found, b), rtol=1e-12, atol=1e-14)


@every_loss
def test_only_the_policy_gets_a_gradient_and_only_through_the_loss(loss: Loss) -> None:
    b = batch()
    for name in OTHERS:
        b[name].requires_grad_()
    found = loss(b, 7)
    found.loss.backward()
    assert b["logprobs"].grad.any()
    assert [name for name in OTHERS if b[name].grad is not None] == []
    assert [name for name, value in figures(found).items() if value.requires_grad] == ["loss"]


@every_loss
@pytest.mark.parametrize("dirt", [math.nan, math.inf, -math.inf])
def test_what_stands_under_no_mask_changes_nothing(loss: Loss, dirt: float) -> None:
    b = batch()
    dirty = {
        name: torch.where(b["mask"], values.detach(), dirt) if values.dim() == 2 else values
        for name, values in b.items()
        if name != "mask"
    } | {"mask": b["mask"]}
    dirty["logprobs"].requires_grad_()
    found, clean = loss(dirty, 7), loss(b, 7)
    for name, value in figures(clean).items():
        assert torch.equal(figures(found)[name], value)
    assert torch.equal(gradient(found, dirty), gradient(clean, b))


@every_loss
@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (3, 0)])
@pytest.mark.parametrize("normalizer", repeated([0, 7]))
def test_an_empty_mask_gives_zeros_and_a_zero_gradient(
    loss: Loss, shape: tuple[int, int], normalizer: int
) -> None:
    b = batch(*shape)
    b["mask"] = torch.zeros_like(b["mask"])
    found = loss(b, normalizer)
    assert {value.item() for value in figures(found).values()} == {0}
    assert torch.equal(gradient(found, b), torch.zeros(*shape, dtype=torch.float64))


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_probs_keep_loss_and_gradient_finite(loss: Loss, dtype: torch.dtype) -> None:
    b = batch(rows=4, seed=3)
    b["mask"][0, 0] = True
    far = {"logprobs": (0.0, -50.0), "old": (-50.0, 0.0), "sampling": (-50.0, -1e-3)}
    for name, (even, odd) in far.items():
        values = torch.full((4, 5), even, dtype=dtype)
        values[:, 1::2] = odd
        b[name] = values
    b["logprobs"].requires_grad_()
    found = loss(b, 7)
    assert torch.isfinite(found.loss)
    assert torch.isfinite(gradient(found, b)).all()


@every_loss
def test_float32_agrees_with_float64_and_half_precision_is_computed_in_float32(loss: Loss) -> None:
    b = batch(rows=6, tokens=9, seed=11)
    half = {n: v.detach().bfloat16() if v.is_floating_point() else v for n, v in b.items()}
    single = {n: v.float() if v.is_floating_point() else v for n, v in half.items()}
    double = {n: v.double() if v.is_floating_point() else v for n, v in half.items()}
    for values in (half, single, double):
        values["logprobs"].requires_grad_()
    exact, found = loss(double, 7), loss(single, 7)
    assert exact.loss.dtype == torch.float64
    torch.testing.assert_close(found.loss.double(), exact.loss, rtol=5e-5, atol=2e-6)
    torch.testing.assert_close(
        gradient(found, single).double(), gradient(exact, double), rtol=5e-5, atol=2e-6
    )
    assert torch.equal(loss(half, 7).loss, found.loss)


PER_TOKEN = {name: loss for name, loss in LOSSES.items() if name not in PER_SEQUENCE}


@pytest.mark.parametrize("loss", PER_TOKEN.values(), ids=PER_TOKEN)
def test_one_advantage_per_sequence_equals_the_same_one_on_each_token(loss: Loss) -> None:
    b = batch()
    spread = b | {"advantages": b["advantages"].unsqueeze(-1).expand(3, 5).clone()}
    torch.testing.assert_close(loss(spread, 7).loss, loss(b, 7).loss, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", PER_SEQUENCE.values(), ids=PER_SEQUENCE)
def test_one_advantage_per_token_is_refused_where_it_is_not_defined(loss: Loss) -> None:
    b = batch()
    spread = b | {"advantages": b["advantages"].unsqueeze(-1).expand(3, 5)}
    with pytest.raises(ValueError, match=r"one per token, but .+ is defined for one per sequence"):
        loss(spread, 7)


@every_loss
def test_a_single_sequence_needs_no_batch_axis(loss: Loss) -> None:
    b = batch()
    one = {name: values[1] for name, values in b.items()}
    torch.testing.assert_close(loss(one, 7).loss, loss(rows_of(b, slice(1, 2)), 7).loss)


@every_loss
def test_an_impossible_normalizer_is_named(loss: Loss) -> None:
    with pytest.raises(ValueError, match="normalizer is -1 but must be a finite count"):
        loss(batch(), -1)


def test_weights_carry_no_gradient() -> None:
    b = batch()
    old, sampling = b["old"].requires_grad_(), b["sampling"].requires_grad_()
    assert not sampling_weights(old, sampling, b["mask"]).requires_grad
    assert not off_policy_weights(
        b["logprobs"], sampling, b["advantages"], b["mask"], threshold=0.1
    ).requires_grad


def test_the_table_of_contents_names_what_it_holds() -> None:
    assert [name for name in policy.__all__ if not hasattr(policy, name)] == []

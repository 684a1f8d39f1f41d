"""The reverse KL from sampled tokens: its definition, its expectation and its weights."""

import math

import pytest
import torch
from torch import Tensor

from composer_mesh.losses.distillation import (
    generalized_jsd,
    importance_weights,
    sampled_reverse_kl,
)

FLOATS = [(torch.float64, 1e-9, 1e-11), (torch.float32, 5e-5, 2e-6)]


def batch(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Student, teacher and old log-probs, weights and a mask of [3, 5] tokens, in float64."""
    rng = torch.Generator().manual_seed(seed)
    logprobs = -scale * torch.rand(3, 3, 5, generator=rng, dtype=torch.float64)
    weights = torch.rand(3, 5, generator=rng, dtype=torch.float64)
    return *logprobs, weights, torch.rand(3, 5, generator=rng) < 0.7


@pytest.mark.parametrize("scale", [2.0, 50.0])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), FLOATS)
@pytest.mark.parametrize("is_clip", [None, 0.5, 2.0])
def test_value_and_gradient_agree_with_the_definition(
    is_clip: float | None, dtype: torch.dtype, rtol: float, atol: float, scale: float
) -> None:
    student, teacher, old, weights, mask = (x.to(dtype) for x in batch(5, scale))
    mask = mask.bool()
    student.requires_grad_()
    found = sampled_reverse_kl(
        student, teacher, mask, normalizer=4, old_logprobs=old, is_clip=is_clip, weights=weights
    )
    found.backward()
    value, gradient = 0.0, torch.zeros(3, 5, dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        new, log_ratio = student[b, t].item(), (student - old)[b, t].item()
        w = 1.0 if is_clip is None else min(math.exp(max(-20, min(20, log_ratio))), is_clip)
        slope = w * weights[b, t].item() * (new - teacher[b, t].item()) / 4
        gradient[b, t] = slope
        value += slope * new
    assert found.item() == pytest.approx(value, rel=rtol, abs=atol)
    torch.testing.assert_close(student.grad.double(), gradient, rtol=rtol, atol=atol)


def test_in_expectation_the_gradient_is_that_of_the_reverse_kl() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 1, 6, generator=rng, dtype=torch.float64)
    student.requires_grad_()
    exact = generalized_jsd(student, teacher, torch.tensor([True]), jsd_beta=1, normalizer=1)
    (wanted,) = torch.autograd.grad(exact, student)
    # Every entry once, weighted by the chance that the student samples it.
    sampled = sampled_reverse_kl(
        student.log_softmax(-1),
        teacher.log_softmax(-1),
        torch.ones(1, 6, dtype=torch.bool),
        weights=student.softmax(-1),
        normalizer=1,
    )
    (found,) = torch.autograd.grad(sampled, student)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_without_old_logprobs_every_token_counts_once() -> None:
    student, teacher, old, _, mask = batch()
    plain = sampled_reverse_kl(student, teacher, mask, normalizer=3)
    uncapped = sampled_reverse_kl(
        student, teacher, mask, normalizer=3, old_logprobs=old, is_clip=None
    )
    assert torch.equal(plain, uncapped)


def test_importance_weights_are_capped_detached_ratios() -> None:
    new = torch.tensor([0.0, -1.0, -3.0, 0.0, -100.0], requires_grad=True)
    old = torch.tensor([-0.5, -1.0, -1.0, -30.0, 0.0])
    found = importance_weights(new, old, 2.0)
    expected = [math.exp(0.5), 1.0, math.exp(-2), 2.0, math.exp(-20)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert not found.requires_grad
    uncapped = importance_weights(new, old, math.inf)
    assert uncapped[3].item() == pytest.approx(math.exp(20), rel=1e-6)


def test_a_cap_that_drops_everything_is_refused() -> None:
    student, teacher, old, _, mask = batch()
    with pytest.raises(ValueError, match="is_clip is 0 but has to be > 0"):
        sampled_reverse_kl(student, teacher, mask, normalizer=1, old_logprobs=old, is_clip=0)

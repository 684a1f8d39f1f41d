"""SDPO's loss and its gathered form against plain definitions; the tail bucket and the weights."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.distillation import (
    generalized_jsd,
    importance_weights,
    sdpo_loss,
    topk_distillation,
)

ALPHAS = [0.0, 0.3, 0.5, 1.0]
FLOATS = [(torch.float64, 1e-9, 1e-11), (torch.float32, 5e-5, 2e-6)]


def batch(seed: int = 0, scale: float = 2.0, entries: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits, teacher logits and a mask of [2, 4] tokens, in float64."""
    rng = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(2, 2, 4, entries, generator=rng, dtype=torch.float64)
    student, teacher = scores.clamp(-50, 50)
    return student.requires_grad_(), teacher, torch.rand(2, 4, generator=rng) < 0.8


def sampling(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(2, 4, generator=rng, dtype=torch.float64)
    return {"targets": torch.randint(7, (2, 4), generator=rng), "old_logprobs": old}


def divergence(s: Tensor, t: Tensor, alpha: float) -> Tensor:
    if alpha == 0:
        return (t * (t / s).log()).sum()
    if alpha == 1:
        return (s * (s / t).log()).sum()
    m = (1 - alpha) * s + alpha * t
    return alpha * divergence(m, t, 0) + (1 - alpha) * divergence(m, s, 0)


def buckets(row: Tensor, ids: list[int], tail: bool) -> Tensor:
    p = row.exp() / row.exp().sum()
    if not tail:
        return p[ids] / p[ids].sum()
    others = [v for v in range(len(row)) if v not in ids]
    return torch.stack([*p[ids], p[others].sum()])


def sdpo_by_hand(
    student: Tensor, teacher: Tensor, mask: Tensor, alpha: float, k: int, tail: bool, choice: str
) -> Tensor:
    """Sum over tokens, at temperature 0.8 and with the weights of `sampling()` capped at 2."""
    extra, total = sampling(), torch.zeros((), dtype=torch.float64)
    for b, t in mask.nonzero().tolist():
        s, p = student[b, t] / 0.8, teacher[b, t] / 0.8
        chooser = s if choice == "student" else p
        ids = sorted(range(len(s)), key=lambda v: -chooser[v].item())[:k]
        target = int(extra["targets"][b, t])
        new = math.log(s.exp()[target].item() / s.exp().sum().item())
        weight = min(math.exp(new - extra["old_logprobs"][b, t].item()), 2.0)
        total = total + weight * divergence(buckets(s, ids, tail), buckets(p, ids, tail), alpha)
    return total


@pytest.mark.parametrize(("dtype", "rtol", "atol"), FLOATS)
@pytest.mark.parametrize("choice", ["student", "teacher"])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_value_and_gradient_agree_with_the_definition(
    alpha: float, tail: bool, choice: Any, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    student, teacher, mask = batch(seed=6)
    expected = sdpo_by_hand(student, teacher, mask, alpha, 3, tail, choice) / 4
    (wanted,) = torch.autograd.grad(expected, student)
    single = student.detach().to(dtype).requires_grad_()
    extra = {k: v if k == "targets" else v.to(dtype) for k, v in sampling().items()}
    found = sdpo_loss(
        single,
        teacher.to(dtype),
        mask,
        jsd_beta=alpha,
        top_k=3,
        tail=tail,
        choice=choice,
        temperature=0.8,
        normalizer=4,
        **extra,
    )
    found.backward()
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(single.grad.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("scale", [2.0, 50.0])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("top_k", [7, 1000, None])
def test_without_a_cut_the_loss_is_the_generalized_jsd(
    top_k: int | None, alpha: float, scale: float
) -> None:
    student, teacher, mask = batch(scale=scale)
    expected = generalized_jsd(student, teacher, mask, jsd_beta=alpha, normalizer=3)
    (wanted,) = torch.autograd.grad(expected, student)
    for tail in (True, False):
        found = sdpo_loss(
            student, teacher, mask, jsd_beta=alpha, top_k=top_k, tail=tail, normalizer=3
        )
        (gradient,) = torch.autograd.grad(found, student)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_gathered_form_is_the_loss_on_logits(alpha: float, tail: bool) -> None:
    student, teacher, mask = batch()
    extra = sampling()
    expected = sdpo_loss(
        student, teacher, mask, jsd_beta=alpha, top_k=3, tail=tail, normalizer=5, **extra
    )
    (wanted,) = torch.autograd.grad(expected, student)
    ids = student.topk(3).indices
    s_log, t_log = student.log_softmax(-1), teacher.log_softmax(-1)
    new = s_log.gather(-1, extra["targets"][..., None]).squeeze(-1)
    found = topk_distillation(
        s_log.gather(-1, ids),
        t_log.gather(-1, ids),
        mask,
        jsd_beta=alpha,
        tail=tail,
        weights=importance_weights(new, extra["old_logprobs"]),
        normalizer=5,
    )
    (gradient,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)


@given(
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1.0, 5.0, 12.0, 50.0]),
    k=st.integers(1, 7),
    alpha=st.sampled_from(ALPHAS),
)
@settings(max_examples=60, deadline=None)
def test_a_tail_of_almost_nothing_is_as_good_in_float32_as_in_float64(
    seed: int, scale: float, k: int, alpha: float
) -> None:
    scores, teacher, mask = batch(seed, scale)
    scores, teacher = scores.detach().float(), teacher.float()
    results = []
    for dtype in (torch.float32, torch.float64):
        student = scores.to(dtype).clone().requires_grad_()
        loss = sdpo_loss(student, teacher.to(dtype), mask, jsd_beta=alpha, top_k=k, normalizer=8)
        loss.backward()
        results.append((loss.detach().double(), student.grad.double()))
    torch.testing.assert_close(results[0], results[1], rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_padded_vocabulary_contributes_nothing(dtype: torch.dtype, tail: bool) -> None:
    student, teacher, mask = (x.detach() for x in batch())
    padding = torch.full((2, 4, 3), -math.inf, dtype=torch.float64)
    student = torch.cat([student, padding], -1).to(dtype).requires_grad_()
    teacher = torch.cat([teacher, padding], -1).to(dtype)
    for k in (3, 7, 8, 10):
        padded = sdpo_loss(student, teacher, mask, top_k=k, tail=tail, normalizer=3)
        plain = sdpo_loss(
            student[..., :7], teacher[..., :7], mask, top_k=k, tail=tail, normalizer=3
        )
        (gradient,) = torch.autograd.grad(padded, student)
        (expected,) = torch.autograd.grad(plain, student)
        torch.testing.assert_close(padded, plain)
        torch.testing.assert_close(gradient, expected)


def test_ids_under_no_mask_need_not_be_ids() -> None:
    student, teacher, mask = batch()
    extra = sampling()
    clean = sdpo_loss(student, teacher, mask, top_k=3, normalizer=3, **extra)
    extra["targets"] = torch.where(mask, extra["targets"], -100)
    assert torch.equal(sdpo_loss(student, teacher, mask, top_k=3, normalizer=3, **extra), clean)


def test_without_old_logprobs_or_without_a_cap_the_weight_is_one() -> None:
    student, teacher, mask = batch()
    plain = sdpo_loss(student, teacher, mask, normalizer=3)
    uncapped = sdpo_loss(student, teacher, mask, is_clip=None, normalizer=3, **sampling())
    torch.testing.assert_close(uncapped, plain)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"jsd_beta": -0.1}, r"jsd_beta is -0.1 but has to be in \[0, 1\]"),
        ({"top_k": 0}, "top_k is 0 but has to be >= 1"),
        ({"temperature": 0.0}, "temperature is 0.0 but has to be > 0"),
        ({"is_clip": 0.0}, "is_clip is 0.0 but has to be > 0"),
        ({"targets": None}, "old_logprobs are given but targets are None"),
    ],
)
def test_an_impossible_setting_is_named_with_its_repair(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sdpo_loss(*batch(), **{"normalizer": 1, **sampling(), **changed})

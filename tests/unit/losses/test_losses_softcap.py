"""Heads with a cap, as Gemma has them: every fused loss equals the one on whole capped scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fused_losses import BLOCKS, NORMALIZER, leaves, rows_of, tolerance, whole_jsd
from torch import Tensor

from composer_mesh.losses.blocks import softcapped
from composer_mesh.losses.distillation import taid_loss
from composer_mesh.losses.entropy import linear_entropies, token_entropies
from composer_mesh.losses.fused import (
    linear_collision_logprobs,
    linear_distillation,
    linear_jsd,
    linear_logprobs,
    linear_scores,
)
from composer_mesh.losses.logprobs import linear_logits
from composer_mesh.losses.pair_terms import collision_logprobs
from composer_mesh.losses.policy import token_logprobs

ROWS, HIDDEN, WORDS = 13, 6, 31
CAP, TEACHERS_CAP = 1.5, 0.8
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
SOME_BLOCKS = pytest.mark.parametrize("block", BLOCKS)


@pytest.fixture
def parts(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    h, weight, bias = leaves((ROWS, HIDDEN), (WORDS, HIDDEN), (WORDS,), dtype=dtype)
    return h, weight, bias


def same(found: Tensor, expected: Tensor, parts: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Values and gradients are equal."""
    pull = torch.linspace(-1, 2, found.numel(), dtype=dtype)
    torch.testing.assert_close(found, expected, **tolerance(dtype))
    torch.testing.assert_close(
        torch.autograd.grad(found.flatten() @ pull, parts, retain_graph=True),
        torch.autograd.grad(expected.flatten() @ pull, parts, retain_graph=True),
        **tolerance(dtype),
    )


@DTYPES
@SOME_BLOCKS
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropies_and_logits(
    parts: tuple[Tensor, Tensor, Tensor], temperature: float, block: int, dtype: torch.dtype
) -> None:
    h, weight, bias = parts
    whole = softcapped(h @ weight.T + bias, CAP)
    assert not torch.allclose(whole, h @ weight.T + bias, atol=0.1)
    targets = torch.arange(ROWS) % WORDS
    found = linear_logprobs(
        h, weight, targets, bias=bias, softcap=CAP, temperature=temperature, block=block
    )
    same(found, token_logprobs(whole, targets, temperature), parts, dtype)
    entropies = linear_entropies(
        h, weight, bias=bias, softcap=CAP, temperature=temperature, block=block
    )
    same(entropies, token_entropies(whole, temperature), parts, dtype)
    logits = linear_logits(h, weight, bias, temperature, softcap=CAP)
    same(logits, whole / temperature, parts, dtype)


@DTYPES
@SOME_BLOCKS
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("beta", [0, 0.4, 1])
def test_the_divergence_of_two_heads_with_caps_of_their_own(
    parts: tuple[Tensor, Tensor, Tensor],
    beta: float,
    temperature: float,
    block: int,
    dtype: torch.dtype,
) -> None:
    h, weight, bias = parts
    teacher, head = leaves((ROWS, HIDDEN + 2), (WORDS, HIDDEN + 2), dtype=dtype)
    whole = softcapped(h @ weight.T + bias, CAP)
    found = linear_jsd(
        h,
        weight,
        teacher,
        head,
        student_bias=bias,
        student_softcap=CAP,
        teacher_softcap=TEACHERS_CAP,
        jsd_beta=beta,
        temperature=temperature,
        normalizer=NORMALIZER,
        block=block,
    )
    same(
        found,
        whole_jsd(whole, softcapped(teacher @ head.T, TEACHERS_CAP), beta, temperature),
        parts,
        dtype,
    )


@DTYPES
@SOME_BLOCKS
def test_losses_by_autograd(
    parts: tuple[Tensor, Tensor, Tensor], block: int, dtype: torch.dtype
) -> None:
    h, weight, bias = parts
    teacher, head = leaves((ROWS, HIDDEN + 2), (WORDS, HIDDEN + 2), dtype=dtype)
    whole = softcapped(h @ weight.T + bias, CAP)
    others = softcapped(teacher @ head.T, TEACHERS_CAP)

    def taid(own: Tensor, theirs: Tensor) -> Tensor:
        return taid_loss(own, theirs, rows_of(len(own)), t=0.3, normalizer=NORMALIZER)

    found = linear_distillation(
        lambda own, theirs, _: taid(own, theirs),
        h,
        weight,
        teacher,
        head,
        student_bias=bias,
        student_softcap=CAP,
        teacher_softcap=TEACHERS_CAP,
        block=block,
    )
    same(found, taid(whole, others), parts, dtype)
    scored = linear_scores(
        lambda own, _: own.square().sum(), h, weight, bias=bias, softcap=CAP, block=block
    )
    same(scored, whole.square().sum(), parts, dtype)


@DTYPES
@SOME_BLOCKS
def test_collisions(parts: tuple[Tensor, Tensor, Tensor], block: int, dtype: torch.dtype) -> None:
    h, weight, bias = parts
    found = linear_collision_logprobs(h, weight, bias=bias, softcap=CAP, block=block)
    expected = collision_logprobs(softcapped(h @ weight.T + bias, CAP))
    torch.testing.assert_close(found, expected, **tolerance(dtype))


def refused(h: Tensor, weight: Tensor) -> list[Callable[[], Tensor]]:
    some = torch.zeros(len(h), dtype=torch.long)
    return [
        lambda: linear_logprobs(h, weight, some, softcap=0),
        lambda: linear_entropies(h, weight, softcap=-1.0),
        lambda: linear_collision_logprobs(h, weight, softcap=float("nan")),
        lambda: linear_jsd(h, weight, h, weight, jsd_beta=1, normalizer=1, teacher_softcap=0),
        lambda: linear_scores(lambda own, _: own.sum(), h, weight, softcap=0),
    ]


def test_caps_that_no_head_has_are_refused() -> None:
    for call in refused(*leaves((2, 3), (5, 3))):
        with pytest.raises(ValueError, match=r"softcap is .* leave it out"):
            call()

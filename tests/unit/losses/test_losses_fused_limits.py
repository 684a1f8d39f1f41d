"""The limits of fused losses: memory, dtypes, extreme scores, missing gradients, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fused_losses import (
    BETAS,
    NORMALIZER,
    jsd_step,
    leaves,
    logprobs_step,
    tolerance,
    whole_jsd,
)
from largest_tensor import LargestTensor
from torch import Tensor

from composer_mesh.losses.fused import (
    linear_jsd,
    linear_logprobs,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [logprobs_step, jsd_step])
def test_no_tensor_grows_with_rows_times_vocabulary(
    step: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    rows, vocabulary, hidden, block = 200, 300, 4, 1000
    h, weight = leaves((rows, hidden), (vocabulary, hidden), dtype=dtype)
    with LargestTensor() as largest:
        step(h, weight, block).backward()
    assert largest.numbers <= max(block, rows * hidden, vocabulary * hidden)


@pytest.mark.parametrize("step", [logprobs_step, jsd_step])
def test_bfloat16_inputs_are_summed_in_float32(step: Callable[..., Tensor]) -> None:
    h, weight = leaves((60, 32), (200, 32), dtype=torch.bfloat16)
    exact = [value.detach().float().requires_grad_() for value in (h, weight)]
    found, expected = step(h, weight, 700), step(*exact, 700)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for half, full in zip(
        torch.autograd.grad(found, [h, weight]), torch.autograd.grad(expected, exact), strict=True
    ):
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half, full.bfloat16(), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
def test_extreme_scores_stay_finite_and_exact(beta: float, dtype: torch.dtype) -> None:
    student = torch.tensor([[50.0, -50, 0], [-50, 50, 50], [0, 0, 0]], dtype=dtype)
    teacher = torch.tensor([[-50.0, 50, 0], [50, 50, -50], [50, -50, 0]], dtype=dtype)
    head = torch.eye(3, dtype=dtype)
    student.requires_grad_()
    found = linear_jsd(student, head, teacher, head, jsd_beta=beta, normalizer=NORMALIZER)
    expected = whole_jsd(student, teacher, beta)
    torch.testing.assert_close(found, expected, **tolerance(dtype))
    torch.testing.assert_close(
        torch.autograd.grad(found, student),
        torch.autograd.grad(expected, student),
        **tolerance(dtype),
    )


def test_no_gradient_reaches_the_teacher() -> None:
    h, weight, teacher, head = leaves((4, 3), (5, 3), (4, 3), (5, 3))
    linear_jsd(h, weight, teacher, head, jsd_beta=0.5, normalizer=1).backward()
    assert h.grad is not None
    assert teacher.grad is None
    assert head.grad is None


def test_a_teacher_with_the_students_own_head_leaves_it_the_students_gradient() -> None:
    h, weight, teacher = leaves((4, 3), (5, 3), (4, 3))
    shared = torch.autograd.grad(
        linear_jsd(h, weight, teacher, weight, jsd_beta=0.5, normalizer=1), weight
    )
    copied = torch.autograd.grad(
        linear_jsd(h, weight, teacher, weight.detach().clone(), jsd_beta=0.5, normalizer=1), weight
    )
    torch.testing.assert_close(shared, copied)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen: int) -> None:
    inputs = leaves((4, 3), (5, 3))
    inputs[frozen].requires_grad_(False)
    h, weight = inputs
    targets = torch.arange(4)
    for loss in (
        linear_logprobs(h, weight, targets).sum(),
        linear_jsd(h, weight, h.detach() + 1, weight, jsd_beta=0.5, normalizer=1),
    ):
        loss.backward()
    assert inputs[frozen].grad is None
    assert inputs[1 - frozen].grad is not None


def test_without_grad_no_gradient_is_made() -> None:
    h, weight = leaves((40, 2), (3, 2))
    with torch.no_grad(), LargestTensor() as largest:
        jsd_step(h.repeat(1, 50), weight.repeat(1, 50), block=3)
    assert largest.numbers <= h.numel() * 50
    with LargestTensor() as largest:
        loss = jsd_step(h, weight, block=3)
    assert largest.numbers >= weight.numel()
    assert loss.requires_grad


@pytest.mark.parametrize("step", [logprobs_step, jsd_step])
def test_no_rows_give_zero_with_a_graph(step: Callable[..., Tensor]) -> None:
    h, weight = leaves((0, 3), (5, 3))
    loss = step(h, weight, 10)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("step", [logprobs_step, jsd_step])
def test_losses_of_parts_add_up(step: Callable[..., Tensor]) -> None:
    h, weight = leaves((9, 3), (11, 3))
    whole = linear_jsd(h, weight, h.detach() + 1, weight, jsd_beta=0.3, normalizer=9)
    parts = [
        linear_jsd(p, weight, p.detach() + 1, weight, jsd_beta=0.3, normalizer=9)
        for p in h.split(4)
    ]
    torch.testing.assert_close(whole, torch.stack(parts).sum())


def test_rows_without_a_gradient_are_left_out_of_the_backward() -> None:
    h, weight = leaves((6, 3), (5, 3))
    pull = torch.tensor([0.0, 1, 0, 0, -2, 0], dtype=torch.float64)
    (linear_logprobs(h, weight, torch.zeros(6, dtype=torch.long)) * pull).sum().backward()
    assert h.grad is not None
    assert h.grad.abs().sum(-1).ne(0).tolist() == pull.ne(0).tolist()


def test_a_second_backward_through_a_kept_graph_gives_the_same_gradient() -> None:
    h, weight = leaves((6, 3), (5, 3))
    loss = 0.25 * linear_jsd(h, weight, h.detach() + 1, weight, jsd_beta=0.5, normalizer=1)
    first = torch.autograd.grad(loss, [h, weight], retain_graph=True)
    kept = [value.clone() for value in first]
    torch.testing.assert_close(torch.autograd.grad(loss, [h, weight]), tuple(kept))


def test_equal_heads_and_states_diverge_by_nothing() -> None:
    h, weight = leaves((6, 3), (5, 3))
    for beta in BETAS:
        loss = linear_jsd(h, weight, h.detach(), weight, jsd_beta=beta, normalizer=1)
        assert loss.item() == pytest.approx(0, abs=1e-12)
        for gradient in torch.autograd.grad(loss, [h, weight]):
            assert gradient.abs().max().item() < 1e-12


def test_half_and_half_is_bounded_by_log_2() -> None:
    h, weight, teacher, head = (value * 20 for value in leaves((50, 3), (7, 3), (50, 3), (7, 3)))
    loss = linear_jsd(h, weight, teacher, head, jsd_beta=0.5, normalizer=50)
    assert 0 < loss.item() <= math.log(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"jsd_beta": 1.5}, "jsd_beta is 1.5"),
        ({"temperature": 0}, "temperature is 0"),
        ({"normalizer": -1}, "normalizer is -1"),
        ({"block": 0}, "block is 0"),
    ],
)
def test_bad_values_are_refused(change: dict[str, float], message: str) -> None:
    h, weight = leaves((2, 3), (5, 3))
    with pytest.raises(ValueError, match=message):
        linear_jsd(h, weight, h, weight, **{"jsd_beta": 0.5, "normalizer": 1, **change})  # type: ignore[arg-type]

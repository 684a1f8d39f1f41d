"""Head and loss in one: the same numbers and gradients as on whole scores, never made whole.

The limits of fused losses: memory, dtypes, extreme scores, missing gradients, refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_losses import (
    BETAS,
    BLOCKS,
    NORMALIZER,
    SIZES,
    jsd_step,
    leaves,
    logprobs_step,
    rows_of,
    tolerance,
    whole_jsd,
)
from largest_tensor import LargestTensor
from repetition import repeated
from torch import Tensor

from composer_mesh.losses.distillation import distillation_figures, generalized_jsd, taid_loss
from composer_mesh.losses.fused import (
    linear_collision_logprobs,
    linear_distillation,
    linear_jsd,
    linear_logprobs,
    linear_scores,
)
from composer_mesh.losses.policy import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("rows", "hidden", "vocabulary"), SIZES)
def test_logprobs_and_gradients_are_those_of_whole_scores(
    rows: int, hidden: int, vocabulary: int, block: int, dtype: torch.dtype
) -> None:
    inputs = leaves((rows, hidden), (vocabulary, hidden), (vocabulary,), dtype=dtype)
    h, weight, bias = inputs
    targets = torch.arange(rows) % vocabulary
    pull = torch.linspace(-1, 2, rows, dtype=dtype)
    for temperature in (1.0, 0.7):
        expected = token_logprobs(h @ weight.T + bias, targets, temperature)
        found = linear_logprobs(h, weight, targets, bias=bias, temperature=temperature, block=block)
        torch.testing.assert_close(found, expected, **tolerance(dtype))
        torch.testing.assert_close(
            torch.autograd.grad(found @ pull, inputs),
            torch.autograd.grad(expected @ pull, inputs),
            **tolerance(dtype),
        )


@pytest.mark.parametrize("dtype", repeated([torch.float64, torch.float32]))
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("rows", "hidden", "vocabulary"), SIZES)
def test_the_divergence_and_its_gradients_are_those_of_whole_scores(
    rows: int, hidden: int, vocabulary: int, beta: float, block: int, dtype: torch.dtype
) -> None:
    inputs = leaves((rows, hidden), (vocabulary, hidden), (vocabulary,), dtype=dtype)
    h, weight, bias = inputs
    teacher, head = leaves((rows, hidden + 2), (vocabulary, hidden + 2), dtype=dtype)
    for temperature in (1.0, 1.7):
        expected = whole_jsd(h @ weight.T + bias, teacher @ head.T, beta, temperature)
        found = linear_jsd(
            h,
            weight,
            teacher,
            head,
            student_bias=bias,
            jsd_beta=beta,
            temperature=temperature,
            normalizer=NORMALIZER,
            block=block,
        )
        torch.testing.assert_close(found, expected, **tolerance(dtype))
        torch.testing.assert_close(
            torch.autograd.grad(found, inputs),
            torch.autograd.grad(expected, inputs),
            **tolerance(dtype),
        )


@pytest.mark.parametrize("block", [1, 50, None])
@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_adds_up_both_entropies_once(beta: float, block: int | None) -> None:
    rng = torch.Generator().manual_seed(3)
    h, teacher = (torch.randn(7, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    weight, head = (torch.randn(11, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    entropies = torch.ones(2, dtype=torch.float64)
    loss = linear_jsd(
        h.requires_grad_(),
        weight,
        teacher,
        head,
        jsd_beta=beta,
        temperature=1.3,
        normalizer=9,
        block=block,
        entropies=entropies,
    )
    loss.backward(retain_graph=True)
    loss.backward()  # makes the scores again, and no figures
    expected = distillation_figures(
        h @ weight.T,
        teacher @ head.T,
        torch.ones(7, dtype=torch.bool),
        temperature=1.3,
        normalizer=9,
    )
    both = torch.stack([expected.student_entropy, expected.teacher_entropy])
    torch.testing.assert_close(entropies - 1, both)


@pytest.mark.parametrize("block", [1, 50, None])
@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_tells_that_of_each_row(beta: float, block: int | None) -> None:
    rng = torch.Generator().manual_seed(3)
    h, teacher = (torch.randn(7, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    weight, head = (torch.randn(11, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    found = torch.full((7,), torch.nan, dtype=torch.float64)
    shared: dict[str, Any] = {"jsd_beta": beta, "temperature": 1.3}
    with torch.no_grad():
        linear_jsd(h, weight, teacher, head, **shared, normalizer=9, block=block, divergences=found)
    every = torch.ones(7, dtype=torch.bool)
    expected = generalized_jsd(h @ weight.T, teacher @ head.T, every, **shared, reduction="none")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("block", [1, 50, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_collision_probabilities_are_those_of_whole_scores(
    block: int | None, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 4, generator=rng, dtype=dtype, requires_grad=True)
    weight, bias = (torch.randn(*s, generator=rng, dtype=dtype) for s in ((11, 4), (11,)))
    found = linear_collision_logprobs(hidden, weight, bias=bias, block=block)
    assert not found.requires_grad
    probabilities = (hidden @ weight.T + bias).softmax(-1)
    torch.testing.assert_close(found, probabilities.square().sum(-1).log().detach())


@pytest.mark.parametrize("t", [0, 0.4, 1])
def test_any_other_loss_gets_the_gradients_of_whole_scores(t: float) -> None:
    inputs = leaves((13, 4), (17, 4))
    h, weight = inputs
    teacher, head = leaves((13, 6), (17, 6))

    def taid(student: Tensor, teacher: Tensor, rows: slice | None = None) -> Tensor:
        return taid_loss(student, teacher, rows_of(len(student)), t=t, normalizer=NORMALIZER)

    expected = taid(h @ weight.T, teacher @ head.T)
    found = linear_distillation(taid, h, weight, teacher, head, block=50)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs)
    )


@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_may_be_known_by_its_scores(beta: float) -> None:
    h, weight, teacher, head = leaves((13, 4), (17, 4), (13, 6), (17, 6))
    scores = (teacher @ head.T).detach()
    kept = scores.clone()
    options = {"jsd_beta": beta, "temperature": 1.3, "normalizer": NORMALIZER, "block": 50}
    by_head = linear_jsd(h, weight, teacher, head, **options)
    by_scores = linear_jsd(h, weight, scores, None, **options)
    torch.testing.assert_close(by_scores, by_head)
    torch.testing.assert_close(
        torch.autograd.grad(by_scores, [h, weight]), torch.autograd.grad(by_head, [h, weight])
    )
    assert torch.equal(scores, kept)


def test_a_loss_on_the_students_scores_alone_gets_their_gradients() -> None:
    h, weight = leaves((13, 4), (17, 4))
    ids = torch.arange(13 * 3).view(13, 3) % 17

    def loss(scores: Tensor, rows: slice) -> Tensor:
        return scores.log_softmax(-1).gather(-1, ids[rows]).square().sum()

    found = linear_scores(loss, h, weight, block=50)
    expected = loss(h @ weight.T, slice(None))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, [h, weight]), torch.autograd.grad(expected, [h, weight])
    )


def test_blocks_tell_a_loss_which_rows_they_are() -> None:
    h, weight = leaves((7, 3), (5, 3))
    weights = torch.linspace(0, 2, 7, dtype=torch.float64)

    def weighted(student: Tensor, teacher: Tensor, rows: slice) -> Tensor:
        return (student.logsumexp(-1) * weights[rows]).sum()

    found = linear_distillation(weighted, h, weight, h, weight, block=10)
    torch.testing.assert_close(found, ((h @ weight.T).logsumexp(-1) * weights).sum())


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


def test_log_probs_of_bfloat16_sum_no_gradient_of_the_heads_size_in_float32() -> None:
    h, weight = leaves((64, 8), (500, 8), dtype=torch.bfloat16)
    loss = logprobs_step(h, weight, 64 * 20)
    with LargestTensor(torch.float32) as largest:
        loss.backward()
    assert 0 < largest.numbers < weight.numel() / 2


@pytest.mark.parametrize("block", [1, 12, None])
def test_entries_without_probability_and_targets_outside_of_the_vocabulary(
    block: int | None,
) -> None:
    h, weight = leaves((3, 4), (9, 4))
    bias = torch.zeros(9, dtype=torch.float64)
    bias[:5] = -torch.inf
    targets = torch.tensor([5, 8, 9])
    found = linear_logprobs(h, weight, targets, bias=bias, block=block)
    expected = (h @ weight.T)[:, 5:].log_softmax(-1)
    torch.testing.assert_close(found[:2], expected[[0, 1], [0, 3]])
    assert bool(found[2].isnan())
    torch.testing.assert_close(
        torch.autograd.grad(found[:2].sum(), [h, weight]),
        torch.autograd.grad(expected[[0, 1], [0, 3]].sum(), [h, weight]),
    )


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

"""TAID: the loss at both ends and between them, and the schedule that moves between them.

Heads with a cap, as Gemma has them: every fused loss equals the one on whole capped scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_losses import BLOCKS, NORMALIZER, leaves, rows_of, tolerance, whole_jsd
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.blocks import softcapped
from composer_mesh.losses.distillation import TaidSchedule, taid_loss
from composer_mesh.losses.entropy import linear_entropies, token_entropies
from composer_mesh.losses.fused import (
    linear_collision_logprobs,
    linear_distillation,
    linear_jsd,
    linear_logits,
    linear_logprobs,
    linear_scores,
)
from composer_mesh.losses.policy import token_logprobs
from composer_mesh.losses.preference import collision_logprobs

TIMES = [0, 0.0, 0.4, 0.9, 1.0, 1]


FLOATS = [(torch.float64, 1e-9, 1e-11), (torch.float32, 5e-5, 2e-6)]


def batch(seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits, teacher logits and a mask of [3, 4] tokens over 6 entries, in float64."""
    rng = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(2, 3, 4, 6, generator=rng, dtype=torch.float64)
    student, teacher = scores.clamp(-50, 50)
    return student.requires_grad_(), teacher, torch.rand(3, 4, generator=rng) < 0.7


@pytest.mark.parametrize("scale", [2.0, 50.0])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), FLOATS)
@pytest.mark.parametrize("t", TIMES)
def test_value_and_gradient_agree_with_the_definition(
    t: float, dtype: torch.dtype, rtol: float, atol: float, scale: float
) -> None:
    student, teacher, mask = batch(seed=2, scale=scale)
    single = student.detach().to(dtype).requires_grad_()
    teacher = teacher.to(dtype)
    found = taid_loss(single, teacher, mask, t=t, temperature=1.5, normalizer=4)
    found.backward()
    value, gradient = 0.0, torch.zeros(3, 4, 6, dtype=torch.float64)
    for b, i in mask.nonzero().tolist():
        s, p = single[b, i].detach().double() / 1.5, teacher[b, i].double() / 1.5
        mixed = (1 - t) * s + t * p
        target = (mixed - mixed.max()).exp()
        target = target / target.sum()
        log_s = s - s.max() - (s - s.max()).exp().sum().log()
        value -= (target * log_s).sum().item() / 4
        gradient[b, i] = (log_s.exp() - target) / 1.5 / 4
    assert found.item() == pytest.approx(value, rel=rtol, abs=atol)
    torch.testing.assert_close(single.grad.double(), gradient, rtol=rtol, atol=atol)


def padded(padding: int) -> tuple[Tensor, Tensor, Tensor]:
    student, teacher, mask = batch()
    minus = torch.full((3, 4, padding), -math.inf, dtype=torch.float64)
    wide = torch.cat([student.detach(), minus], -1)
    return wide.requires_grad_(), torch.cat([teacher, minus], -1), mask


@pytest.mark.parametrize("t", TIMES)
def test_padding_the_vocabulary_changes_nothing(t: float) -> None:
    student, teacher, mask = padded(2)
    wide = taid_loss(student, teacher, mask, t=t, normalizer=3)
    plain = taid_loss(student[..., :6], teacher[..., :6], mask, t=t, normalizer=3)
    wide.backward()
    torch.testing.assert_close(wide, plain, rtol=1e-12, atol=1e-14)
    assert torch.isfinite(student.grad).all()


def test_a_teacher_without_an_entry_of_the_student_asks_for_none_of_it() -> None:
    student = torch.tensor([[1.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, -math.inf]])
    for t in (0.5, 1.0):
        found = taid_loss(student, teacher, torch.tensor([True]), t=t, normalizer=1)
        assert found.item() == pytest.approx(-student.log_softmax(-1)[0, 0].item())


@pytest.mark.parametrize("t", [-0.1, 1.1, math.nan])
def test_a_time_outside_its_range_is_refused(t: float) -> None:
    with pytest.raises(ValueError, match=r"t is .* but must be in \[0, 1\]"):
        taid_loss(*batch(), t=t, normalizer=1)


def test_the_first_update_only_remembers_the_loss() -> None:
    for adaptive in (True, False):
        schedule = TaidSchedule(adaptive=adaptive)
        assert schedule.update(2.0, 50, 100) == 0.4
        assert schedule.update(2.0, 50, 100) >= 0.7


def test_a_schedule_that_is_not_adaptive_is_a_line() -> None:
    schedule = TaidSchedule(adaptive=False)
    found = [schedule.update(1.0 / (1 + step), step, 10) for step in range(11)]
    assert found[1:] == pytest.approx([0.4 + 0.06 * step for step in range(1, 11)])


@given(losses=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30), alpha=st.floats(0, 1))
def test_an_adaptive_t_never_falls_and_never_passes_the_end(
    losses: list[float], alpha: float
) -> None:
    schedule = TaidSchedule(t_start=0.1, t_end=0.9, alpha=alpha)
    found = [schedule.update(loss, step, len(losses)) for step, loss in enumerate(losses)]
    assert found == sorted(found)
    assert all(0.1 <= t <= 0.9 for t in found)


def test_a_restored_schedule_continues_as_if_it_had_never_stopped() -> None:
    losses = [3.0, 2.5, 2.7, 2.0, 1.9, 1.5]
    whole, first = TaidSchedule(alpha=0.1), TaidSchedule(alpha=0.1)
    expected = [whole.update(loss, step, 6) for step, loss in enumerate(losses)]
    for step in range(3):
        first.update(losses[step], step, 6)
    second = TaidSchedule(alpha=0.1)
    second.load_state_dict(first.state_dict())
    assert [second.update(losses[step], step, 6) for step in range(3, 6)] == expected[3:]
    fresh = TaidSchedule()
    fresh.load_state_dict(TaidSchedule().state_dict())
    assert fresh == TaidSchedule()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"t_start": 1.0}, r"t_start is 1.0 but must be in \[0, 1\)"),
        ({"t_end": 0.3}, r"t_end is 0.3 but must be in \[0.4, 1\]"),
        ({"alpha": 2.0}, r"alpha is 2.0 but must be in \[0, 1\]: use 0.0005"),
        ({"beta": -1.0}, r"beta is -1.0 but must be in \[0, 1\]: use 0.99"),
    ],
)
def test_an_impossible_schedule_is_named_with_its_bound(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TaidSchedule(**settings)


@pytest.mark.parametrize(
    ("loss", "step", "steps", "message"),
    [
        (math.nan, 0, 10, "loss is nan but must be finite"),
        (1.0, 11, 10, r"step is 11 of 10 but must be in \[0, steps\]"),
        (1.0, 0, 0, "step is 0 of 0 but must be in"),
    ],
)
def test_an_impossible_update_is_refused_and_changes_nothing(
    loss: float, step: int, steps: int, message: str
) -> None:
    schedule = TaidSchedule()
    with pytest.raises(ValueError, match=message):
        schedule.update(loss, step, steps)
    assert schedule == TaidSchedule()


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

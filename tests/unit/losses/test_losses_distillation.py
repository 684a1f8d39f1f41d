"""The generalized JSD against a loop over the vocabulary, its closed-form gradient and limits.

The entropies of student and teacher beside a distillation loss.

Every distillation loss against recorded results of the published code, loss and gradient.

A teacher's weights as the moving average of a student's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from upstream_cases import DISTILLATION, check_distillation, distillation_cases

from composer_mesh.losses import distillation
from composer_mesh.losses.distillation import (
    distillation_figures,
    ema_update,
    ema_update_tensor,
    generalized_jsd,
)

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def batch(seed: int = 0, scale: float = 3.0, rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits, teacher logits and a mask of [rows, 4] tokens over 6 entries, in float64."""
    rng = torch.Generator().manual_seed(seed)
    student = scale * torch.randn(rows, 4, 6, generator=rng, dtype=torch.float64)
    teacher = scale * torch.randn(rows, 4, 6, generator=rng, dtype=torch.float64)
    mask = torch.rand(rows, 4, generator=rng) < 0.6
    return student.requires_grad_(), teacher, mask


def softmax(scores: list[float], temperature: float) -> list[float]:
    top = max(scores)
    weights = [math.exp((x - top) / temperature) for x in scores]
    return [w / sum(weights) for w in weights]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def jsd_by_hand(s: list[float], p: list[float], beta: float) -> float:
    if beta == 0:
        return kl(p, s)
    if beta == 1:
        return kl(s, p)
    m = [(1 - beta) * a + beta * b for a, b in zip(s, p, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(s, m)


def gradient_by_hand(s: list[float], p: list[float], beta: float, t: float) -> list[float]:
    """d loss / d logits of one row, the closed forms of the reference."""
    if beta == 0:
        return [(a - b) / t for a, b in zip(s, p, strict=True)]
    if beta == 1:
        total = kl(s, p)
        return [a * (math.log(a / b) - total) / t for a, b in zip(s, p, strict=True)]
    m = [(1 - beta) * a + beta * b for a, b in zip(s, p, strict=True)]
    e = [(1 - beta) * a * math.log(a / c) for a, c in zip(s, m, strict=True)]
    return [(x - a * math.fsum(e)) / t for x, a in zip(e, s, strict=True)]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_agree_with_the_definition(beta: float, temperature: float) -> None:
    student, teacher, mask = batch(seed=5)
    found = generalized_jsd(
        student, teacher, mask, jsd_beta=beta, temperature=temperature, normalizer=7
    )
    found.backward()
    value, gradient = 0.0, torch.zeros_like(student)
    for b, t in mask.nonzero().tolist():
        s = softmax(student[b, t].tolist(), temperature)
        p = softmax(teacher[b, t].tolist(), temperature)
        value += jsd_by_hand(s, p, beta)
        row = gradient_by_hand(s, p, beta, temperature)
        gradient[b, t] = torch.tensor(row, dtype=torch.float64)
    assert found.item() == pytest.approx(value / 7, rel=1e-9)
    torch.testing.assert_close(student.grad, gradient / 7, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("beta", BETAS)
def test_a_vocabulary_padded_with_minus_infinity_is_the_vocabulary_without_padding(
    beta: float,
) -> None:
    student, teacher, mask = batch()
    padding = torch.full((3, 4, 2), -math.inf, dtype=torch.float64)
    plain = generalized_jsd(student, teacher, mask, jsd_beta=beta, normalizer=3)
    (expected,) = torch.autograd.grad(plain, student)
    padded = torch.cat([student.detach(), padding], -1).requires_grad_()
    found = generalized_jsd(
        padded, torch.cat([teacher, padding], -1), mask, jsd_beta=beta, normalizer=3
    )
    found.backward()
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(padded.grad[..., :6], expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(padded.grad[..., 6:], torch.zeros(3, 4, 2, dtype=torch.float64))


def test_disjoint_supports_are_log_two_apart_and_infinitely_far_one_way() -> None:
    student = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[-math.inf, 0.0]])
    mask = torch.tensor([True])
    found = generalized_jsd(student, teacher, mask, jsd_beta=0.5, normalizer=1)
    found.backward()
    assert found.item() == pytest.approx(math.log(2))
    assert torch.isfinite(student.grad).all()
    for beta in (0, 1):
        assert (
            generalized_jsd(student, teacher, mask, jsd_beta=beta, normalizer=1).item() == math.inf
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"jsd_beta": 1.5}, r"jsd_beta is 1.5 but must be in \[0, 1\]"),
        ({"temperature": 0.0}, "temperature is 0.0 but must be > 0"),
    ],
)
def test_an_impossible_setting_is_named_with_its_bound(
    changed: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generalized_jsd(*batch(), **{"jsd_beta": 0.5, "normalizer": 1, **changed})


def test_entropies_are_those_of_the_rows_under_the_mask_at_the_temperature() -> None:
    rng = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 3, 4, 6, generator=rng, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=rng) < 0.5
    student[~mask] = math.nan
    found = distillation_figures(student, teacher, mask, temperature=1.7, normalizer=5)
    for rows, entropy in ((student, found.student_entropy), (teacher, found.teacher_entropy)):
        expected = Categorical(logits=rows[mask] / 1.7).entropy().sum() / 5
        torch.testing.assert_close(entropy, expected)


def test_unreduced_entropies_are_of_each_token_and_carry_no_graph() -> None:
    student = torch.zeros(2, 2, 4, requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    teacher = torch.tensor([0.0, -math.inf, -math.inf, 0.0]).expand(2, 2, 4)
    found = distillation_figures(student, teacher, mask, reduction="none")
    torch.testing.assert_close(found.student_entropy, mask * math.log(4))
    torch.testing.assert_close(found.teacher_entropy, mask * math.log(2))
    assert not found.student_entropy.requires_grad


CASES = [
    pytest.param(group, case, id=f"{group['function']}-{number}")
    for number, (group, case) in enumerate(distillation_cases())
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("group", "case"), CASES)
def test_loss_and_gradient_are_those_of_the_published_code(
    group: dict[str, Any], case: dict[str, Any], dtype: torch.dtype
) -> None:
    check_distillation(group, case, dtype)


@pytest.mark.parametrize("case", DISTILLATION["schedule"]["cases"])
def test_the_taid_schedule_is_that_of_the_published_code(case: dict[str, Any]) -> None:
    schedule = distillation.TaidSchedule(**case["settings"])
    steps = len(case["losses"])
    found = [schedule.update(loss, step, steps) for step, loss in enumerate(case["losses"])]
    rtol, _ = DISTILLATION["schedule"]["tolerance"]
    assert found == pytest.approx(case["t"], rel=rtol)


def test_every_loss_has_recorded_cases() -> None:
    losses = {name for name in distillation.__all__ if name.endswith(("_loss", "_jsd", "_kl"))}
    recorded = {group["function"] for group in DISTILLATION["losses"]}
    ours_alone = {"entropy_gated_kl"}
    assert losses - ours_alone <= recorded


def test_repeated_updates_are_the_sum_of_decayed_students() -> None:
    rng = torch.Generator().manual_seed(0)
    start, *students = (torch.randn(3, 2, generator=rng, dtype=torch.float64) for _ in range(5))
    teacher = {"w": start.clone()}
    for student in students:
        ema_update(teacher, {"w": student, "unknown": student}, 0.1)
    expected = 0.9**4 * start
    for age, student in enumerate(reversed(students)):
        expected += 0.1 * 0.9**age * student
    torch.testing.assert_close(teacher["w"], expected)


def test_a_rate_of_one_copies_and_of_zero_keeps() -> None:
    teacher, student = torch.zeros(2), torch.tensor([1.0, 1e-30])
    ema_update_tensor(teacher, student, 0)
    assert teacher.tolist() == [0, 0]
    ema_update_tensor(teacher, student, 1)
    assert torch.equal(teacher, student)


def test_the_average_keeps_the_teachers_dtype_and_memory_and_no_graph() -> None:
    teacher = torch.zeros(2, requires_grad=True)
    memory = teacher.data_ptr()
    ema_update({"w": teacher}, {"w": torch.ones(2, dtype=torch.bfloat16)}, 0.25)
    assert teacher.data_ptr() == memory
    assert teacher.is_leaf
    assert teacher.tolist() == [0.25, 0.25]


def test_whole_numbers_are_copied() -> None:
    teacher = torch.tensor([3])
    ema_update_tensor(teacher, torch.tensor([7]), 0.5)
    assert teacher.tolist() == [7]


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 of the teacher's 1 tensors .*first: a"):
        ema_update({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, 0.5)
    with pytest.raises(ValueError, match=r"has shape \(1,\) but the student's \(2,\)"):
        ema_update_tensor(torch.zeros(1), torch.zeros(2), 0.5)
    with pytest.raises(ValueError, match=r"rate is 1.5 but must be in \[0, 1\]"):
        ema_update_tensor(torch.zeros(1), torch.zeros(1), 1.5)

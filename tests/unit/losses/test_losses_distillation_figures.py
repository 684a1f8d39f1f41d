"""The entropies of student and teacher beside a distillation loss."""

import math

import torch
from torch.distributions import Categorical

from composer_mesh.losses.distillation import distillation_figures


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

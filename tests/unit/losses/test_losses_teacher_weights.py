"""A teacher's weights as the moving average of a student's."""

import pytest
import torch

from composer_mesh.losses.distillation import ema_update, ema_update_tensor


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
    with pytest.raises(ValueError, match=r"rate is 1.5 but has to be in \[0, 1\]"):
        ema_update_tensor(torch.zeros(1), torch.zeros(1), 1.5)

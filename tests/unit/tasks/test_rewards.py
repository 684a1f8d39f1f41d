"""Numbers that tasks return as rewards, and errors that cannot be written."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from composer_mesh import SyncSession, Task, Transcript, reward
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.reward import finite_number


class Silent(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Worth(Task):
    """An episode that is worth what is given, or fails by it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"number": rng.randint(1, 10**6)}

    def prompt(self, row: Any) -> str:
        return "q"

    @reward
    def worth(self, transcript: Transcript) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def reward_of(value: Any) -> float:
    task = Worth.create(value=value)
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("a")
        return session.outcome().reward


@pytest.mark.parametrize(
    "value",
    [
        *(0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)),
        torch.tensor(0.5, dtype=torch.bfloat16),
    ],
)
def test_a_single_number_of_numpy_and_torch_is_a_reward(value: Any) -> None:
    assert reward_of(value) == 0.5


@pytest.mark.parametrize("value", [True, np.True_, np.int64(1), torch.tensor(True), 1])
def test_truth_is_worth_one(value: Any) -> None:
    assert reward_of(value) == 1.0


@pytest.mark.parametrize(
    "value",
    [10**400, float("nan"), np.inf, torch.tensor([1.0]), np.array("a"), "1", None],
)
def test_what_is_no_finite_number_is_no_reward(value: Any) -> None:
    assert finite_number(value) is None
    with pytest.raises(UnusableTask, match="return a finite number"):
        reward_of(value)


def test_an_error_whose_text_fails_is_still_named_with_its_line() -> None:
    with pytest.raises(TaskCodeError, match=r"test_rewards\.py:\d+: Silent: <a Silent whose text"):
        reward_of(Silent())


def test_an_integer_too_long_to_write_is_no_reward() -> None:
    with pytest.raises(UnusableTask, match="a int whose text fails by ValueError"):
        reward_of(10**5000)

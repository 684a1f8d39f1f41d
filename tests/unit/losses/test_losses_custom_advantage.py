"""Custom advantages: PRIME-RL's grouped rollouts, ragged groups, and errors that say where."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_mesh.losses.advantages import group_advantages
from composer_mesh.losses.custom import (
    AdvantageInputs,
    AdvantageOutputs,
    CustomFunctionError,
    custom_advantages,
)

NAME = "my_module.my_advantage"


def normalized(inputs: AdvantageInputs, eps: float = 1e-4) -> AdvantageOutputs:
    """As a PRIME-RL user would write it."""
    rewards = torch.tensor([[r["reward"] for r in group] for group in inputs.rollouts])
    mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    return AdvantageOutputs(advantages=(rewards - mean) / (std + eps))


def rollouts(*rewards: list[float]) -> list[list[dict[str, Any]]]:
    return [[{"reward": r, "trajectory": []} for r in group] for group in rewards]


def test_an_advantage_written_for_prime_rl_equals_the_one_built_in() -> None:
    rewards = [[0.0, 1.0, 1.0], [2.0, -1.0, 0.5]]
    found = custom_advantages(normalized, NAME, {"eps": 1e-6}, rollouts(*rewards))
    expected = group_advantages(torch.tensor(rewards), eps=1e-6)
    torch.testing.assert_close(torch.stack(found), expected)


def test_all_groups_of_one_size_are_shown_in_one_call() -> None:
    calls: list[AdvantageInputs] = []

    def counts(inputs: AdvantageInputs) -> AdvantageOutputs:
        calls.append(inputs)
        return normalized(inputs)

    custom_advantages(counts, NAME, {}, rollouts([0.0, 1.0], [1.0, 3.0], [2.0, 0.0]))
    assert [len(call.rollouts) for call in calls] == [3]


def test_ragged_groups_are_shown_by_size_and_come_back_in_order() -> None:
    rewards = [[0.0, 1.0, 1.0], [5.0, 7.0], [], [2.0, -1.0, 0.5]]
    found = custom_advantages(normalized, NAME, {}, rollouts(*rewards))
    assert [len(group) for group in found] == [3, 2, 0, 3]
    for group, own in zip(found, rewards, strict=True):
        torch.testing.assert_close(group, group_advantages(torch.tensor(own)))


def test_advantages_are_detached_and_at_least_float32() -> None:
    def learned(inputs: AdvantageInputs) -> AdvantageOutputs:
        return AdvantageOutputs(torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True))

    (found,) = custom_advantages(learned, NAME, {}, rollouts([0.0, 1.0]))
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_no_groups_have_no_advantages() -> None:
    assert custom_advantages(normalized, NAME, {}, []) == []


def fails(inputs: AdvantageInputs) -> AdvantageOutputs:
    raise KeyError("reward")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (fails, "it raised KeyError: 'reward'"),
        (lambda inputs: torch.zeros(2, 2), "returned a Tensor without 'advantages'"),
        (lambda inputs: AdvantageOutputs(torch.zeros(4)), r"shape \(4,\) but the rewards \(2, 2\)"),
        (lambda inputs: AdvantageOutputs(torch.ones(2, 2).long()), "advantages are torch.int64"),
        (lambda inputs: SimpleNamespace(advantages=[[1, 2]]), "its advantages are a list"),
    ],
)
def test_a_bad_result_is_an_error_that_names_function_and_prompts(
    function: Callable[..., Any], problem: str
) -> None:
    where = rf"custom function 'my_module.my_advantage', prompt 0 \(a\) to prompt 1: .*{problem}"
    with pytest.raises(CustomFunctionError, match=where):
        custom_advantages(
            function, NAME, {}, rollouts([0.0, 1.0], [1.0, 1.0]), ids=[["a", "b"], ["c", "d"]]
        )


def test_a_non_finite_advantage_names_the_rollout() -> None:
    groups = rollouts([0.0, 1.0], [1.0, 1.0])
    where = r"prompt 1, rollout 0 \(c\): its advantage is nan but has to be finite"
    with pytest.raises(CustomFunctionError, match=where):
        custom_advantages(normalized, NAME, {"eps": 0.0}, groups, ids=[["a", "b"], ["c", "d"]])
    assert math.isnan(normalized(AdvantageInputs(groups), eps=0.0).advantages[1, 0])


def test_a_signature_that_does_not_fit_is_an_error_before_anything_runs() -> None:
    with pytest.raises(CustomFunctionError, match="unexpected keyword argument 'epsilon'"):
        custom_advantages(normalized, NAME, {"epsilon": 1}, [])

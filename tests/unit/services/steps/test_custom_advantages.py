"""A user's advantage function: what it is shown, what it may return, and how it is ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.services.steps.advantages import Advantages, make_advantages
from composer_mesh.services.steps.custom_function_program import ImportedFunction

REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.25, 1.0], [1.0, 1.0, 1.0], [0.5], []]
"""Unequal groups, one of equal rewards, one of a single rollout, one without any."""
Numbers = list[list[float]]
Build = Callable[..., Config]

USERS_MODULE = '''
import torch
from prime_rl.orchestrator.advantage import AdvantageInputs, AdvantageOutputs


def of_rewards(inputs: AdvantageInputs, length_penalty: float = 0.0) -> AdvantageOutputs:
    """Less the best of the group, and a little less for every token."""
    print("called")
    rewards = torch.tensor([[r["reward"] for r in group] for group in inputs.rollouts])
    tokens = torch.tensor([[r["completion_len"] for r in group] for group in inputs.rollouts])
    best = rewards.max(dim=1, keepdim=True).values
    return AdvantageOutputs(advantages=rewards - best - length_penalty * tokens)


def flat(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(advantages=torch.zeros(len(inputs.rollouts)))


def lost(inputs: AdvantageInputs) -> AdvantageOutputs:
    rewards = torch.tensor([[r["reward"] for r in group] for group in inputs.rollouts])
    return AdvantageOutputs(advantages=rewards / rewards)


def endless(inputs: AdvantageInputs) -> AdvantageOutputs:
    while True:
        pass
'''


@pytest.fixture(autouse=True)
def users_module(
    write_module: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module("users_advantages", USERS_MODULE)
    monkeypatch.setenv(IMPORT_PATHS, str(tmp_path))


def custom(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "custom", "import_path": f"users_advantages.{name}", **options}


class Recorded(ImportedFunction):
    """Answers in this process, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Mapping[str, Any]] = []

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        return super().answer(request)


def made(config: Config, recorded: Recorded | None = None) -> Advantages:
    """The configured function, called in this process."""
    return make_advantages(config.advantage, start=lambda _path, _limit_s: recorded or Recorded())


def trace_of(name: str, reward: float, tokens: Sequence[int] = (2,), errors: int = 0) -> Trace:
    turns = [Turn([1, 2], [3] * n, [-1.0] * n, [0] * n, "stop") for n in tokens]
    sites = [ErrorSite(0, "no_answer", "no_answer", {})] * errors
    return Trace(name, 0, 0, "toolbox", "train", 0, turns, [], reward, reward > 0.9, sites)


def groups_of(rewards: Numbers) -> list[list[Trace]]:
    return [
        [trace_of(f"g{row}-{column}", reward) for column, reward in enumerate(group)]
        for row, group in enumerate(rewards)
    ]


def assert_less_the_best(found: Numbers, penalty: float) -> None:
    for group, advantages in zip(REWARDS, found, strict=True):
        assert advantages == pytest.approx([r - max(group) - penalty for r in group], abs=1e-5)


def test_results_of_groups_of_all_sizes_go_back_in_order(build_config: Build) -> None:
    config = build_config(advantage=custom("of_rewards", kwargs={"length_penalty": 0.1}))
    assert_less_the_best(made(config)(groups_of(REWARDS)), 0.2)


def test_a_function_is_shown_what_a_rollout_did(build_config: Build) -> None:
    recorded = Recorded()
    config = build_config(advantage=custom("of_rewards"))
    made(config, recorded)([[trace_of("a", 1.0, (3, 4), errors=2)]])
    assert recorded.requests[1]["groups"] == [
        [
            {
                "reward": 1.0,
                "turn_rewards": [],
                "trace_id": "a",
                "success": True,
                "turns": 2,
                "completion_len": 7,
                "error_sites": 2,
            }
        ]
    ]


@pytest.mark.parametrize("rewards", [[], [[]], [[], []]])
def test_a_function_is_not_asked_about_nothing(build_config: Build, rewards: Numbers) -> None:
    assert made(build_config(advantage=custom("endless")))(groups_of(rewards)) == rewards


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flat", [r"shape \(2,\) but the rewards \(2, 3\)", r"prompt 0 \(g0-0\)"]),
        ("lost", ["its advantage is nan", r"prompt 1, rollout 1 \(g1-1\)"]),
    ],
)
def test_what_a_function_returns_is_checked_by_name_and_trace(
    build_config: Build, name: str, words: list[str]
) -> None:
    advantages = made(build_config(advantage=custom(name)))
    for word in [f"custom function 'users_advantages.{name}'", *words]:
        with pytest.raises(CustomFunctionError, match=word):
            advantages(groups_of([[1.0, 0.5, 0.5], [1.0, 0.0, 1.0]]))


def test_a_function_that_does_not_fit_is_refused_before_any_rollout(build_config: Build) -> None:
    for section in (custom("absent"), custom("flat", kwargs={"scale": 2})):
        with pytest.raises(CustomFunctionError, match=section["import_path"]):
            made(build_config(advantage=section))


def test_a_run_calls_the_function_in_another_process(
    build_config: Build, capfd: pytest.CaptureFixture[str]
) -> None:
    advantages = make_advantages(build_config(advantage=custom("of_rewards")).advantage)
    for _ in range(2):
        assert_less_the_best(advantages(groups_of(REWARDS)), 0.0)
    assert "called\n" in capfd.readouterr().err
    assert "users_advantages" not in sys.modules


def test_a_function_without_end_is_ended_with_its_name_and_the_limit(build_config: Build) -> None:
    advantages = make_advantages(build_config(advantage=custom("endless")).advantage, 0.1)
    for said in ("did not answer in time, SIGKILL", "has ended"):  # and it is not started again
        with pytest.raises(CustomFunctionError, match=said) as caught:
            advantages(groups_of(REWARDS))
        assert "custom function 'users_advantages.endless'" in str(caught.value)
        assert "0.1 s" in str(caught.value)
        assert "raise supervision.custom_function_s" in str(caught.value)

"""Advantages of a step's groups: the configured formula, and groups of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.services.steps.advantages import make_advantages
from composer_mesh.services.steps.batcher import Batcher
from composer_mesh.tasks.toolbox import ToolboxTask

REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.25, 1.0], [1.0, 1.0, 1.0], [0.5], []]
"""Unequal groups, one of equal rewards, one of a single rollout, one without any."""
Numbers = list[list[float]]
Build = Callable[..., Config]


def trace_of(name: str, reward: float, tokens: Sequence[int] = (2,), errors: int = 0) -> Trace:
    turns = [Turn([1, 2], [3] * n, [-1.0] * n, [0] * n, "stop") for n in tokens]
    sites = [ErrorSite(0, "no_answer", "no_answer", {})] * errors
    return Trace(name, 0, 0, "toolbox", "train", 0, turns, [], reward, reward > 0.9, sites)


def groups_of(rewards: Numbers, tokens: int = 2) -> list[list[Trace]]:
    return [
        [trace_of(f"g{row}-{column}", reward, (tokens,)) for column, reward in enumerate(group)]
        for row, group in enumerate(rewards)
    ]


def advantages(config: Config, rewards: Numbers) -> Numbers:
    return make_advantages(config.advantage)(groups_of(rewards))


def assert_equal(found: Numbers, expected: Numbers, tolerance: float = 1e-5) -> None:
    assert [len(group) for group in found] == [len(group) for group in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


def centred(group: list[float]) -> list[float]:
    return [reward - fmean(group) for reward in group]


@pytest.mark.parametrize(("std", "deviation"), [("unbiased", stdev), ("population", pstdev)])
def test_group_advantages_are_divided_by_the_groups_own_deviation(
    build_config: Build, std: str, deviation: Callable[[list[float]], float]
) -> None:
    config = build_config(advantage={"std": std, "eps": 0.01})
    expected = [
        [part / (deviation(group) + 0.01) for part in centred(group)] for group in REWARDS[:2]
    ]
    assert_equal(advantages(config, REWARDS), [*expected, [0.0] * 3, [0.0], []])


def test_group_is_the_default_with_grpos_conventions(build_config: Build) -> None:
    explicit = {"type": "group", "scale": "group", "std": "unbiased", "eps": 1e-4}
    plain, named = build_config(), build_config(advantage=explicit)
    assert advantages(plain, REWARDS) == advantages(named, REWARDS)


def test_scale_none_only_takes_the_mean_off(build_config: Build) -> None:
    found = advantages(build_config(advantage={"scale": "none"}), REWARDS)
    assert_equal(
        found, [centred(group) if len(group) > 1 else [0.0] * len(group) for group in REWARDS]
    )


def test_scale_batch_divides_by_the_deviation_of_all_rollouts_that_exist(
    build_config: Build,
) -> None:
    found = advantages(build_config(advantage={"scale": "batch", "eps": 0.0}), REWARDS)
    deviation = stdev([reward for group in REWARDS for reward in group])
    assert_equal(
        found, [[part / deviation for part in centred(group)] if group else [] for group in REWARDS]
    )


def test_rloo_compares_with_the_mean_of_the_others(build_config: Build) -> None:
    expected = [
        [reward - (sum(group) - reward) / max(1, len(group) - 1) for reward in group]
        for group in REWARDS
    ]
    assert_equal(advantages(build_config(advantage={"type": "rloo"}), REWARDS), expected)


def test_max_rl_divides_by_the_groups_mean(build_config: Build) -> None:
    rewards = [*REWARDS, [0.0, 0.0]]
    expected = [[part / fmean(group) for part in centred(group)] for group in REWARDS[:2]]
    found = advantages(build_config(advantage={"type": "max_rl"}), rewards)
    assert_equal(found, [*expected, [0.0] * 3, [0.0], [], [0.0, 0.0]])


@pytest.mark.parametrize("baseline", [True, False])
def test_reinforce_plus_plus_whitens_over_all_sampled_tokens(
    build_config: Build, baseline: bool
) -> None:
    config = build_config(advantage={"type": "reinforce_plus_plus", "baseline": baseline})
    groups = [
        [trace_of("a", 1.0, (3, 1)), trace_of("b", 0.0, (1,))],
        [trace_of("c", 0.5, (2,)), trace_of("d", 1.0, (5,)), trace_of("e", 0.25, (1, 1, 1))],
        [trace_of("f", 0.5, (2,))],
    ]
    rewards = [[trace.reward for trace in group] for group in groups]
    # A group of one keeps its reward: it has no others to be compared with.
    raw = [centred(g) if baseline and len(g) > 1 else g for g in rewards]
    tokens = [
        value
        for group, values in zip(groups, raw, strict=True)
        for trace, value in zip(group, values, strict=True)
        for _ in range(trace.action_tokens())
    ]
    mean, deviation = fmean(tokens), stdev(tokens)
    expected = [[(value - mean) / deviation for value in values] for values in raw]
    assert_equal(make_advantages(config.advantage)(groups), expected, 1e-4)


GROUPS = [
    [trace_of("a", 1.0, (3, 1)), trace_of("b", 0.0, (1,))],
    [trace_of("c", 0.5, (2,)), trace_of("d", 1.0, (5,)), trace_of("e", 0.25, (1, 1, 1))],
]


def test_opo_weights_the_mean_by_sampled_tokens(build_config: Build) -> None:
    found = make_advantages(build_config(advantage={"type": "opo"}).advantage)(GROUPS)
    assert_equal(found, [[0.2, -0.8], [0.5 - 0.675, 0.325, 0.25 - 0.675]])


def test_gpg_multiplies_by_rollouts_over_rewarded_rollouts(build_config: Build) -> None:
    found = make_advantages(build_config(advantage={"type": "gpg"}).advantage)(GROUPS)
    expected = [[value * 5 / 4 for value in centred([t.reward for t in g])] for g in GROUPS]
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("penalty", "terms"),
    [
        (
            {"type": "overlong", "max_length": 5, "buffer": 2, "factor": 0.4},
            [[-0.2, 0.0], [0.0, -0.4, 0.0]],
        ),
        # Rewards above 0.9 are successes here, and only those gain by being short.
        ({"type": "kimi", "weight": 2.0}, [[-1.0, 0.0], [0.0, -1.0, 0.0]]),
        (
            {"type": "relative", "weight": 0.3},
            [[-0.15, -0.15 / 4], [-0.175 * 2 / 5, -0.175, -0.175 * 3 / 5]],
        ),
    ],
)
def test_a_length_penalty_is_added_to_the_rewards_before_they_are_compared(
    build_config: Build, penalty: dict[str, Any], terms: Numbers
) -> None:
    config = build_config(advantage={"scale": "none", "length_penalty": penalty})
    expected = [
        centred([trace.reward + term for trace, term in zip(group, row, strict=True)])
        for group, row in zip(GROUPS, terms, strict=True)
    ]
    assert_equal(make_advantages(config.advantage)(GROUPS), expected)


TYPES: list[dict[str, Any]] = [
    {"type": "group"},
    {"type": "group", "scale": "batch"},
    {"type": "group", "scale": "none"},
    {"type": "rloo"},
    {"type": "max_rl"},
    {"type": "reinforce_plus_plus"},
    {"type": "reinforce_plus_plus", "baseline": False},
    {"type": "opo"},
    {"type": "gpg"},
    {"type": "rloo", "length_penalty": {"type": "kimi"}},
    {"type": "opo", "length_penalty": {"type": "relative"}},
    {"type": "rloo", "length_penalty": {"type": "grpo_lead"}},
    {"type": "gpg", "length_penalty": {"type": "overlong", "max_length": 9, "buffer": 3}},
]
EMPTY: list[Numbers] = [[], [[]], [[], []]]


@pytest.mark.parametrize("section", TYPES)
@pytest.mark.parametrize("rewards", EMPTY)
def test_a_step_without_rollouts_has_no_advantages(
    build_config: Build, section: dict[str, Any], rewards: Numbers
) -> None:
    assert advantages(build_config(advantage=section), rewards) == rewards


@pytest.mark.parametrize("section", TYPES)
def test_advantages_are_finite_whatever_is_missing(
    build_config: Build, section: dict[str, Any]
) -> None:
    make = make_advantages(build_config(advantage=section).advantage)
    for groups in (groups_of(REWARDS), groups_of([[1.0]]), groups_of([[1.0, 0.0]], tokens=0)):
        found = make(groups)
        assert [len(group) for group in found] == [len(group) for group in groups]
        assert all(math.isfinite(value) for group in found for value in group)


@pytest.mark.parametrize("section", [*TYPES[:1], *TYPES[2:5], {"type": "opo"}])
def test_other_groups_change_nothing_for_a_group(
    build_config: Build, section: dict[str, Any]
) -> None:
    config = build_config(advantage=section)
    alone = [advantages(config, [group])[0] for group in REWARDS]
    assert_equal(advantages(config, REWARDS), alone)


@pytest.mark.parametrize("section", [{"type": "rloo"}, {"type": "opo"}])
def test_a_batch_holds_the_configured_advantage_of_each_rollout_that_acted(
    build_config: Build, tokenizer: Any, toolbox: ToolboxTask, section: dict[str, Any]
) -> None:
    config = build_config(advantage=section, logprob_mismatch={"all_tokens": True})
    groups = groups_of(REWARDS)
    groups[0][1] = replace(groups[0][1], turns=[])
    make = make_advantages(config.advantage)
    batcher = Batcher(config, toolbox, ChatFormat(tokenizer, toolbox.tools), make, print)
    batch = batcher.batch(4, groups, [])
    expected = {
        trace.trace_id: advantage
        for group, found in zip(groups, make(groups), strict=True)
        for trace, advantage in zip(group, found, strict=True)
        if trace.turns
    }
    assert batch.step == 4
    assert {sample.trace_id: sample.advantage for sample in batch.samples} == expected
    assert [sample.trace_id for sample in batch.samples] == list(expected)
    assert "g0-1" not in expected

"""Group advantages against the statistics module and their invariants.

Advantages of rollouts against loops over their definitions, and their invariants.

Token advantages and whitening against loops over their definitions.

Advantages of turns against hand-computed cases, and where they are those of rollouts.

What is done to rewards before advantages, against the definitions.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_mesh.losses.advantages import (
    gigpo_advantages,
    gpg_advantages,
    group_advantages,
    grpo_lead_length_reward,
    kimi_length_reward,
    masked_whiten,
    max_rl_advantages,
    mt_grpo_advantages,
    opo_advantages,
    overlong_penalty,
    reinforce_plus_plus_baseline_advantages,
    relative_length_penalty,
    rloo_advantages,
    turn_return_advantages,
    turn_returns,
)
from composer_mesh.losses.group_advantages import centre

rewards_of_a_group = st.lists(st.floats(-2, 2), min_size=2, max_size=8)


@settings(deadline=None)
@given(rewards_of_a_group)
def test_the_group_s_scale_is_the_unbiased_deviation_plus_epsilon(rewards: list[float]) -> None:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), 1e-4)
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (deviation + 1e-4) for r in rewards]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(reward=st.floats(-10, 10, width=32), size=st.integers(1, 9))
def test_equal_rewards_and_a_group_of_one_get_exactly_zero(reward: float, size: int) -> None:
    for scale in ("group", "none"):
        for eps in (1e-4, 0.0):
            found = group_advantages(torch.full((size,), reward), eps, scale=scale)
            assert torch.equal(found, torch.zeros(size))


TIGHT = {"rtol": 1e-9, "atol": 1e-12}


OF_A_GROUP = {
    "group_std": group_advantages,
    "batch_std": lambda r, **kw: group_advantages(r, scale="batch", **kw),
    "group_mean": lambda r, **kw: group_advantages(r, scale="none", **kw),
    "rloo": rloo_advantages,
    "max_rl": max_rl_advantages,
    "gpg": gpg_advantages,
    "opo": lambda r, **kw: opo_advantages(r, 1 + r.nan_to_num().abs(), **kw),
}


def rewards(groups: int = 3, size: int = 5, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(groups, size, generator=rng, dtype=torch.float64)


def some_missing(groups: int = 3, size: int = 5, seed: int = 0) -> Tensor:
    """At least two rollouts of each group are present, and not all are."""
    present = torch.rand(groups, size, generator=torch.Generator().manual_seed(seed)) < 0.6
    present[:, :2], present[:, 2] = True, False
    return present


def test_population_std_divides_by_the_count() -> None:
    values = rewards()
    found = group_advantages(values, eps=1e-6, std="population")
    for row, group in zip(found.tolist(), values.tolist(), strict=True):
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        assert row == pytest.approx([(r - mean) / (deviation + 1e-6) for r in group], rel=1e-9)


def test_max_rl_weighs_a_rare_success_by_how_rare_it_is() -> None:
    found = max_rl_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]))
    assert found.tolist() == [[3, -1, -1, -1], [1, 1, -1, -1], [0, 0, 0, 0]]


def test_max_rl_gives_no_signal_to_a_group_whose_mean_is_not_positive() -> None:
    found = max_rl_advantages(torch.tensor([[0.0, 0.0], [-1.0, 1.0], [-3.0, 1.0]]))
    assert torch.equal(found, torch.zeros(3, 2))


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_a_ragged_group_is_scored_as_if_the_missing_were_not_there(name: str) -> None:
    values, present = rewards(), some_missing()
    function = OF_A_GROUP[name]
    found = function(torch.where(present, values, math.nan), present=present)
    assert torch.equal(found[~present], torch.zeros_like(found[~present]))
    if name == "batch_std":
        deviation = statistics.stdev(values[present].tolist()) + 1e-4
        alone = [(v[p] - v[p].mean()) / deviation for v, p in zip(values, present, strict=True)]
    else:
        alone = [function(v[p]) for v, p in zip(values, present, strict=True)]
    torch.testing.assert_close(found[present], torch.cat(alone), **TIGHT)


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_equal_rewards_get_exactly_zero(name: str) -> None:
    for value in (0.1, 1 / 3, -7.7):
        for dtype in (torch.float32, torch.float64):
            found = OF_A_GROUP[name](torch.full((2, 7), value, dtype=dtype))
            assert torch.equal(found, torch.zeros(2, 7, dtype=dtype))


def test_a_group_of_one_is_zero_or_raw_as_asked() -> None:
    one = torch.tensor([[3.0]])
    assert group_advantages(one).item() == 0
    assert group_advantages(one, scale="none", singleton="raw").item() == 3
    assert group_advantages(one, eps=0.5, singleton="raw").item() == 2
    assert rloo_advantages(one).item() == 3
    assert rloo_advantages(one, singleton="zero").item() == 0
    assert max_rl_advantages(one).item() == 0


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_the_order_of_rollouts_and_prompts_does_not_matter(name: str) -> None:
    values = rewards(4, 6, seed=3)
    rows, columns = torch.tensor([2, 0, 3, 1]), torch.tensor([5, 1, 0, 4, 2, 3])
    shuffled = OF_A_GROUP[name](values[rows][:, columns])
    torch.testing.assert_close(shuffled, OF_A_GROUP[name](values)[rows][:, columns], **TIGHT)


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_advantages_carry_no_gradient_and_the_dtype_of_their_rewards(name: str) -> None:
    values = rewards().requires_grad_()
    found = OF_A_GROUP[name](values)
    assert not found.requires_grad
    assert found.dtype == torch.float64
    single = OF_A_GROUP[name](values.float())
    torch.testing.assert_close(single.double(), found, rtol=5e-5, atol=2e-6)
    assert OF_A_GROUP[name](values.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("name", OF_A_GROUP)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 3)])
def test_nothing_to_score_stays_nothing(name: str, shape: tuple[int, ...]) -> None:
    assert OF_A_GROUP[name](torch.zeros(shape)).shape == shape
    assert OF_A_GROUP[name](torch.zeros(2, 3), present=torch.zeros(2, 3).bool()).sum() == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"std": "biased"}, "std is 'biased': use 'unbiased' or 'population'"),
        ({"scale": "row"}, "scale is 'row': use 'group', 'batch' or 'none'"),
    ],
)
def test_an_unknown_convention_is_an_error_that_names_the_known_ones(
    changed: dict[str, str], message: str
) -> None:
    # Past the type checks of the tests, as a config would.
    unchecked = inspect.unwrap(group_advantages)
    with pytest.raises(ValueError, match=message):
        unchecked(rewards(), **changed)


def test_an_unknown_singleton_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="singleton is 'one': use 'zero' or 'raw'"):
        inspect.unwrap(centre)(rewards(), torch.ones(1, dtype=torch.bool), "one")


def batch(rows: int = 4, tokens: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Values in float64 and a mask with at least two tokens a row."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, tokens, generator=rng) < 0.6
    mask[:, :2] = True
    return torch.randn(rows, tokens, generator=rng, dtype=torch.float64), mask


def whitened(values: list[float]) -> list[float]:
    """The definition in verl's words: 1e-8 in the count and in the root."""
    n = len(values) + 1e-8
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / n * len(values) / (len(values) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def test_whitening_is_over_the_masked_values_only() -> None:
    values, mask = batch()
    found = masked_whiten(torch.where(mask, values, math.nan), mask)
    assert found[mask].tolist() == pytest.approx(whitened(values[mask].tolist()), rel=1e-9)
    assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values_have_nothing_to_whiten(count: int) -> None:
    mask = torch.arange(3) < count
    assert torch.equal(masked_whiten(torch.full((3,), 5.0), mask), torch.zeros(3))


@given(value=st.floats(-9, 9, width=32), size=st.integers(2, 50))
@settings(max_examples=25, deadline=None)
def test_equal_values_whiten_to_nothing(value: float, size: int) -> None:
    found = masked_whiten(torch.full((size,), value), torch.ones(size).bool())
    torch.testing.assert_close(found, torch.zeros(size), rtol=0, atol=1e-6)


def test_reinforce_plus_plus_baseline_centres_by_group_before_it_whitens() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0], [2.0, 2.0, 5.0]], dtype=torch.float64)
    mask = batch(6, 4, seed=2)[1].reshape(2, 3, 4)
    centred = rewards - rewards.mean(-1, keepdim=True)
    flat = centred.unsqueeze(-1).expand(2, 3, 4)[mask].tolist()
    found = reinforce_plus_plus_baseline_advantages(rewards, mask)
    assert found[mask].tolist() == pytest.approx(whitened(flat), rel=1e-9, abs=1e-11)
    assert found[~mask].abs().sum() == 0


def test_an_absent_rollout_counts_neither_in_its_group_nor_in_the_whitening() -> None:
    rewards = torch.tensor([[0.0, 1.0, math.nan], [2.0, 4.0, math.nan]], dtype=torch.float64)
    mask = torch.ones(2, 3, 4).bool()
    present = ~rewards.isnan()
    found = reinforce_plus_plus_baseline_advantages(rewards, mask, present=present)
    without = reinforce_plus_plus_baseline_advantages(rewards[:, :2], mask[:, :2])
    assert torch.equal(found[:, :2], without)
    assert found[:, 2].abs().sum() == 0


def test_a_group_of_one_keeps_its_reward_before_whitening_unless_zero_is_asked() -> None:
    rewards, mask = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1, 2).bool()
    raw = reinforce_plus_plus_baseline_advantages(rewards, mask)
    assert raw.flatten().tolist() == pytest.approx(whitened([1, 1, 3, 3]), rel=1e-6)
    zero = reinforce_plus_plus_baseline_advantages(rewards, mask, singleton="zero")
    assert zero.abs().sum() == 0


def test_token_advantages_are_detached_and_keep_their_dtype() -> None:
    values, mask = batch()
    found = masked_whiten(values.clone().requires_grad_(), mask)
    assert not found.requires_grad
    single = masked_whiten(values.float(), mask)
    torch.testing.assert_close(single.double(), found, rtol=5e-5, atol=2e-6)
    assert masked_whiten(values.bfloat16(), mask).dtype == torch.float32


NONE: dict[str, Any] = {"scale": "none"}


def whole(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def test_returns_are_discounted_from_turn_to_turn_and_end_with_the_rollout() -> None:
    rewards = torch.tensor([[1.0, 0.0, 4.0], [2.0, 8.0, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert turn_returns(rewards, mask, 0.5).tolist() == [[2.0, 2.0, 4.0], [6.0, 8.0, 0.0]]


def test_returns_of_a_turn_are_compared_with_the_same_turn_of_the_others() -> None:
    # Returns with gamma 1/2: 2 2 4 | 6 8 -, so turn 3 has no other to be compared with.
    rewards = torch.tensor([[[1.0, 0.0, 4.0], [2.0, 8.0, math.nan]]])
    mask = torch.tensor([[[True, True, True], [True, True, False]]])
    found = turn_return_advantages(rewards, mask, gamma=0.5, **NONE)
    assert found.tolist() == [[[-2.0, -3.0, 0.0], [2.0, 3.0, 0.0]]]


def test_returns_of_all_turns_are_compared_where_the_group_is_the_baseline() -> None:
    rewards = torch.tensor([[[1.0, 0.0, 4.0], [2.0, 8.0, math.nan]]])
    mask = torch.tensor([[[True, True, True], [True, True, False]]])
    found = turn_return_advantages(rewards, mask, gamma=0.5, baseline="group", **NONE)
    mean = (2 + 2 + 4 + 6 + 8) / 5
    expected = [[2 - mean, 2 - mean, 4 - mean], [6 - mean, 8 - mean, 0.0]]
    torch.testing.assert_close(found[0], torch.tensor(expected))


def test_a_turns_own_reward_and_the_outcome_are_compared_apart() -> None:
    # Turn rewards 1 0 | 0 0, outcomes 0 and 1; the outcome counts half before the last turn.
    rewards = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    found = mt_grpo_advantages(
        rewards, torch.tensor([[0.0, 1.0]]), whole(1, 2, 2), outcome_weight=0.5, **NONE
    )
    assert found.tolist() == [[[0.5 - 0.25, -0.5], [-0.5 + 0.25, 0.5]]]


def test_a_state_that_several_turns_have_seen_compares_what_came_of_it() -> None:
    # State 7 is seen by turn 1 of both and turn 2 of the first; returns there 2, 1 and 0.
    rewards, totals = torch.tensor([[[0.0, 2.0], [1.0, 0.0]]]), torch.tensor([[2.0, 1.0]])
    states = torch.tensor([[[7, 7], [7, 9]]])
    found = gigpo_advantages(rewards, totals, whole(1, 2, 2), states, gamma=1.0, **NONE)
    mean = (2 + 2 + 1) / 3
    expected = [[0.5 + 2 - mean, 0.5 + 2 - mean], [-0.5 + 1 - mean, -0.5]]
    torch.testing.assert_close(found[0], torch.tensor(expected))


def test_equal_numbers_of_other_prompts_are_other_states() -> None:
    rewards, states = torch.tensor([[[5.0], [5.0]], [[1.0], [1.0]]]), torch.zeros(2, 2, 1).long()
    found = gigpo_advantages(rewards, rewards[..., 0], whole(2, 2, 1), states)
    assert found.tolist() == [[[0.0], [0.0]], [[0.0], [0.0]]]


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turn_returns": lambda at_end, mask: turn_return_advantages(at_end, mask),
    "mt_grpo": lambda at_end, mask: mt_grpo_advantages(
        torch.zeros_like(at_end), at_end[..., -1], mask
    ),
    "gigpo": lambda at_end, mask: gigpo_advantages(
        at_end, at_end[..., -1], mask, torch.zeros(mask.shape).long(), step_weight=0.0
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(seed=st.integers(0, 2**16), turns=st.integers(1, 4))
@settings(max_examples=20)
def test_without_rewards_of_turns_each_turn_has_the_advantage_of_its_rollout(
    name: str, seed: int, turns: int
) -> None:
    outcomes = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    at_end = torch.zeros(3, 5, turns)
    at_end[..., -1] = outcomes
    found = ESTIMATORS[name](at_end, whole(3, 5, turns))
    assert torch.equal(found, group_advantages(outcomes).unsqueeze(-1).expand_as(found))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_rollouts_have_no_advantages(name: str) -> None:
    assert ESTIMATORS[name](torch.zeros(2, 0, 1), whole(2, 0, 1)).shape == (2, 0, 1)


def test_a_discount_outside_of_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        turn_returns(torch.zeros(1, 2), whole(1, 2), 1.5)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_opo_weights_the_baseline_by_length() -> None:
    rewards, lengths = normal(3, 5), torch.randint(1, 9, (3, 5))
    for row, reward, length in zip(
        opo_advantages(rewards, lengths).tolist(), rewards.tolist(), lengths.tolist(), strict=True
    ):
        mean = sum(r * n for r, n in zip(reward, length, strict=True)) / sum(length)
        assert row == pytest.approx([r - mean for r in reward], rel=1e-9)


def test_opo_of_equal_lengths_or_of_none_only_takes_the_mean_off() -> None:
    rewards = normal(3, 5)
    expected = group_advantages(rewards, scale="none")
    for lengths in (torch.full((3, 5), 4), torch.zeros(3, 5)):
        torch.testing.assert_close(opo_advantages(rewards, lengths), expected, **TIGHT)


def test_gpg_makes_up_for_rollouts_without_a_reward() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert gpg_advantages(rewards).tolist() == [[6.0, -2.0, -2.0, -2.0], [0.0] * 4]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (500, -0.5)]
)
def test_the_overlong_penalty_grows_over_the_buffer_before_the_limit(
    length: int, penalty: float
) -> None:
    options: dict[str, Any] = {"max_length": 100, "buffer": 20, "factor": 0.5}
    assert overlong_penalty(torch.tensor([length]), **options).item() == pytest.approx(penalty)


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"buffer is {buffer} but must be above 0 and at most"):
        overlong_penalty(torch.ones(2), max_length=100, buffer=buffer)


def test_kimis_length_reward_never_rewards_a_wrong_answer_for_being_short() -> None:
    lengths = torch.tensor([[10, 20, 30], [10, 20, 30], [7, 7, 7]])
    correct = torch.tensor([[True, True, True], [False, False, False], [True, False, True]])
    found = kimi_length_reward(lengths, correct)
    assert found.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.0, -0.5], [0.0, 0.0, 0.0]]


def test_kimis_length_reward_compares_with_the_rollouts_that_exist() -> None:
    lengths, present = torch.tensor([[10, 20, 900]]), torch.tensor([[True, True, False]])
    found = kimi_length_reward(lengths, torch.tensor([[True, True, True]]), present=present)
    assert found.tolist() == [[0.5, -0.5, 0.0]]


def test_grpo_leads_length_reward_is_the_papers_over_the_correct_rollouts_of_a_group() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0, -1.0]])
    lengths, correct = torch.tensor([[100, 200, 300, 900]]), rewards > 0
    terms = grpo_lead_length_reward(rewards, lengths, correct, alpha=0.5)
    # The mean of the correct is 200, and their unbiased standard deviation 100.
    expected = [math.exp(0.5), 1.0, math.exp(-0.5), -1.0]
    assert (rewards + terms)[0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_grpo_leads_length_reward_changes_nothing_where_nothing_is_compared(count: int) -> None:
    lengths = torch.tensor([[10, 20, 900]])
    correct = torch.arange(3).expand(1, 3) < count
    assert not grpo_lead_length_reward(torch.ones(1, 3), lengths, correct).any()


def test_grpo_leads_length_reward_compares_with_the_rollouts_that_exist() -> None:
    lengths, present = torch.tensor([[10, 20, 900]]), torch.tensor([[True, True, False]])
    correct = torch.ones(1, 3, dtype=torch.bool)
    found = grpo_lead_length_reward(torch.ones(1, 3), lengths, correct, present=present)
    alone = grpo_lead_length_reward(torch.ones(1, 2), lengths[:, :2], correct[:, :2])
    assert found[0].tolist() == [*alone[0].tolist(), 0.0]


def test_the_relative_length_penalty_is_a_share_of_the_groups_mean_reward() -> None:
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    lengths = torch.tensor([[10, 40, 20, 30], [1, 2, 3, 4]])
    found = relative_length_penalty(rewards, lengths, weight=0.2)
    assert found[0].tolist() == pytest.approx([-0.025, -0.1, -0.05, -0.075])
    assert not found[1].any()

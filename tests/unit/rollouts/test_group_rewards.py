"""A group's rewards are made of the same parts."""

from __future__ import annotations

from dataclasses import replace

from composer_mesh.rollouts.tasks import total_reward, without_left_out
from composer_mesh.rollouts.traces import Trace, Turn

WEIGHTS = {"own": 1.0, "judged": 2.0}


def trace(sample: int, own: float, judged: float | None, penalty: float = 0.0) -> Trace:
    rewards = {"own": own} if judged is None else {"own": own, "judged": judged}
    left_out = ["judged"] if judged is None else []
    reward = total_reward(rewards, WEIGHTS, penalty)
    made = Trace(f"t{sample}", 0, sample, "task", "train", 0, [], [], reward, False, [], rewards)
    return replace(made, penalty=penalty, left_out=left_out)


def test_a_reward_that_one_rollout_lacks_is_left_out_of_its_whole_group() -> None:
    group = without_left_out([trace(0, 1.0, 0.5), trace(1, 0.5, None, 0.1)], WEIGHTS)
    assert [one.rewards for one in group] == [{"own": 1.0}, {"own": 0.5}]
    assert [one.reward for one in group] == [1.0, 0.4]
    assert all(one.left_out == ["judged"] for one in group)


def test_a_complete_group_stays_as_it_is() -> None:
    group = [trace(0, 1.0, 0.5), trace(1, 0.5, 0.0, 0.3)]
    assert without_left_out(group, WEIGHTS) == group


def test_rewards_of_turns_stay_when_another_is_left_out() -> None:
    turn = Turn([1], [2], [-0.5], [0], "stop")
    with_turns = replace(
        trace(1, 0.5, None),
        turns=[turn],
        turn_rewards=[0.25],
        rewards={"own": 0.5, "by_turn": 0.25},
        reward=0.75,
    )
    group = without_left_out([trace(0, 1.0, 0.5), with_turns], WEIGHTS)
    assert [one.reward for one in group] == [1.0, 0.75]
    assert group[1].rewards == {"own": 0.5, "by_turn": 0.25}


def test_a_penalty_takes_no_reward_below_zero() -> None:
    assert total_reward({"own": 0.2}, WEIGHTS, 0.5) == 0.0
    assert total_reward({"own": -0.2}, WEIGHTS, 0.5) == -0.2

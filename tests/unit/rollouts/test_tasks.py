"""A group's rewards are made of the same parts.

Poison: equal failures of one episode speak against it, but not those of one cause.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.tasks import (
    Shortage,
    Trial,
    short_groups,
    total_reward,
    without_left_out,
)
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


def test_equal_failures_of_attempts_one_after_the_other_add_up() -> None:
    trial = Trial()
    assert [trial.failed(trial.begin(), "KeyError: 'a'") for _ in range(3)] == [1, 2, 3]
    assert trial.attempts == 3


def test_attempts_that_were_under_way_together_count_once() -> None:
    trial = Trial()
    together = [trial.begin() for _ in range(8)]
    assert [trial.failed(began, "OSError: gone") for began in together] == [1] * 8
    assert trial.failed(trial.begin(), "OSError: gone") == 2
    assert trial.attempts == 9


def test_an_attempt_that_began_before_a_failure_was_counted_adds_nothing_to_it() -> None:
    trial = Trial()
    early = trial.begin()
    assert trial.failed(trial.begin(), "x") == 1
    assert trial.failed(trial.begin(), "x") == 2
    assert trial.failed(early, "x") == 2


def test_different_failures_are_counted_apart() -> None:
    trial = Trial()
    found = [trial.failed(trial.begin(), key) for key in ("a", "b", "a", "c", "a")]
    assert found == [1, 1, 2, 1, 3]


def test_what_an_attempt_had_no_part_in_speaks_against_nothing() -> None:
    trial = Trial()
    assert [trial.failed(trial.begin(), None) for _ in range(5)] == [0] * 5
    assert trial.failed(trial.begin(), "a") == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40))
def test_no_failure_is_seen_more_often_than_attempts_failed_with_it(
    events: list[tuple[int, bool]],
) -> None:
    trial, under_way = Trial(), dict.fromkeys(range(5), 0)
    failed: list[int] = []
    for sample, begins in events:
        if begins or not under_way[sample]:
            under_way[sample] = trial.begin()
        else:
            failed.append(trial.failed(under_way.pop(sample), "x"))
            under_way[sample] = 0
    assert failed == sorted(failed)
    assert all(times <= place + 1 for place, times in enumerate(failed))


def test_a_group_is_short_with_less_than_half_of_its_rollouts() -> None:
    assert short_groups([8, 4, 3, 0], wanted=8) == 2
    assert short_groups([], wanted=8) == 0


def test_a_shortage_is_one_that_goes_on() -> None:
    shortage = Shortage()
    steps = [[0, 0, 8, 8], [0, 0, 0, 8], [8, 8, 8, 8], [0, 0, 0, 0], [0, 0, 0, 8]]
    assert [shortage.step(sizes, 8) for sizes in steps] == [False, False, False, False, True]

"""What a state is worth: each sign lies between 0 and 1 and says what its name says."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.configs.replay import GateConfig
from composer_mesh.rollouts.consensus import ActionKey
from composer_mesh.rollouts.pairs import FrozenState, StudentState
from composer_mesh.rollouts.state_choice import (
    LONGEST_NAME,
    Novelty,
    StateSignals,
    action_disagreement,
    entropy_sign,
    error_sign,
    reward_spread,
    situation,
    state_value,
)
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite, Trace

SHARES = st.floats(0, 1)
WEIGHTS = st.floats(0, 1e12)


def trace(success: bool, *errors: tuple[int, str]) -> Trace:
    sites = [ErrorSite(turn, kind, kind, {}) for turn, kind in errors]
    return Trace("t", 0, 0, "toolbox", "train", 0, [], [], 0.0, success, sites)


def words(text: str) -> ActionKey:
    return ActionKey("words", text)


def test_an_error_is_worth_most_then_a_failed_episode_then_nothing() -> None:
    assert error_sign(trace(True, (1, "wrong_type")), 1) == 1.0
    assert error_sign(trace(False, (1, "wrong_type")), 0) == 0.5
    assert error_sign(trace(True, (1, "wrong_type")), 0) == 0.0


def test_surprise_grows_with_the_surprisal_of_the_sampled_tokens() -> None:
    assert entropy_sign([0.0, 0.0], scale=1.0) == 0.0
    assert entropy_sign([-1.0, -1.0], scale=1.0) == pytest.approx(1 - math.exp(-1))
    assert entropy_sign([-1.0, -3.0], scale=2.0) == pytest.approx(1 - math.exp(-1))
    assert entropy_sign([-math.inf], scale=1.0) == 1.0
    assert entropy_sign([], scale=1.0) == 0.0


def test_disagreement_is_the_share_of_the_others_who_did_something_else() -> None:
    acted = Counter({words("a"): 3, words("b"): 1})
    assert action_disagreement(words("a"), acted) == pytest.approx(1 / 3)
    assert action_disagreement(words("b"), acted) == 1.0
    assert action_disagreement(words("a"), Counter({words("a"): 8})) == 0.0
    assert action_disagreement(words("a"), Counter({words("a"): 1})) == 0.0


def test_rewards_are_spread_most_where_half_succeed() -> None:
    assert reward_spread([0.0, 0.0, 1.0, 1.0]) == 1.0
    assert reward_spread([1.0, 1.0, 1.0, 1.0]) == 0.0
    assert reward_spread([0.0, 0.0, 0.0, 1.0]) == pytest.approx(0.75)
    assert reward_spread([-10.0, 10.0]) == 1.0
    assert reward_spread([]) == 0.0


def test_a_situation_is_the_task_what_was_before_what_was_done_and_its_error() -> None:
    of = trace(False, (0, "malformed_call"), (1, "unknown_tool"))
    call = call_text("f" * 99, {})
    assert situation(of, 0, "<tool_call>") == "toolbox: opening: malformed: malformed_call"
    assert situation(of, 1, call) == (
        f"toolbox: malformed_call: calls {'f' * LONGEST_NAME}: unknown_tool"
    )
    assert situation(of, 2, "Answer: 5") == "toolbox: unknown_tool: answers: no error"
    assert situation(of, 3, "Answer: 5") == "toolbox: going on: answers: no error"


def test_a_situation_is_less_new_each_time_it_was_asked_about() -> None:
    novelty = Novelty()
    assert novelty.sign("a") == 1.0
    state = StudentState(FrozenState("s", [], 0), "t", 0, "", [], [], 0, situation="a")
    novelty.count_queries([state])
    assert novelty.sign("a") == 0.5
    novelty.count_queries([state, state])
    assert novelty.sign("a") == 0.25
    assert novelty.sign("b") == 1.0
    assert novelty.counts == {"a": 3}
    assert Novelty(novelty.counts).sign("a") == 0.25


def test_only_signs_with_a_weight_count() -> None:
    signs = StateSignals(error=1.0, entropy=0.25, disagreement=0.5, novelty=0.0)
    alone = {"error": 0.0, "entropy": 0.0, "disagreement": 0.0, "novelty": 0.0}
    assert state_value(signs, GateConfig(**{**alone, "entropy": 3.0})) == 0.25
    assert state_value(signs, GateConfig(**{**alone, "error": 1.0, "novelty": 3.0})) == 0.25


@given(
    signs=st.builds(StateSignals, SHARES, SHARES, SHARES, SHARES),
    weights=st.tuples(WEIGHTS, WEIGHTS, WEIGHTS, WEIGHTS).filter(any),
    more=SHARES,
)
def test_a_value_is_a_share_and_grows_with_each_sign(
    signs: StateSignals, weights: tuple[float, ...], more: float
) -> None:
    names = ("error", "entropy", "disagreement", "novelty")
    gate = GateConfig(**dict(zip(names, weights, strict=True)))
    value = state_value(signs, gate)
    assert 0 <= value <= 1
    for name in names:
        higher = {**{n: getattr(signs, n) for n in names}, name: max(more, getattr(signs, name))}
        assert state_value(StateSignals(**higher), gate) >= value


@given(logprobs=st.lists(st.floats(-1e6, 0.001), max_size=5), scale=st.floats(0.001, 1e6))
def test_surprise_is_a_share(logprobs: list[float], scale: float) -> None:
    assert 0 <= entropy_sign(logprobs, scale) <= 1

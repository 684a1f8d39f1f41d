"""Traces: token ids are whole, each sampled one is accounted for, and a line of JSON is enough."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from composer_mesh.rollouts.traces import (
    ErrorSite,
    Message,
    Trace,
    Turn,
    equal_rewards,
    trace_from_json,
    trace_to_json,
)

IDS = st.lists(st.integers(0, 999), min_size=1, max_size=6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    action = draw(IDS)
    logprobs = draw(
        st.lists(st.floats(-40, 0), min_size=len(action), max_size=len(action)),
    )
    versions = draw(st.lists(st.integers(0, 9), min_size=len(action), max_size=len(action)))
    return Turn(draw(IDS), action, logprobs, versions, draw(st.sampled_from(["stop", "length"])))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    sites = draw(st.lists(st.builds(ErrorSite, st.integers(0, 3), TEXT, TEXT, st.just({"k": "v"}))))
    messages: list[Message] = [
        {"role": "user", "content": draw(TEXT)},
        {"role": "assistant", "tool_calls": []},
    ]
    return Trace(
        draw(TEXT),
        draw(st.integers(0, 99)),
        draw(st.integers(0, 9)),
        "toolbox",
        draw(st.sampled_from(["train", "heldout"])),
        draw(st.integers(0, 99)),
        draw(st.lists(turns(), max_size=4)),
        messages,
        draw(st.floats(0, 1)),
        draw(st.booleans()),
        sites,
    )


@given(traces())
def test_a_line_of_json_gives_the_same_trace_back(trace: Trace) -> None:
    line = trace_to_json(trace)
    assert b"\n" not in line
    assert trace_from_json(line) == trace


@given(traces())
def test_the_mask_selects_exactly_the_sampled_ids_in_order(trace: Trace) -> None:
    ids, mask = trace.token_ids(), trace.action_mask()
    assert len(ids) == len(mask)
    sampled = [token for token, own in zip(ids, mask, strict=True) if own]
    assert sampled == [token for turn in trace.turns for token in turn.action_ids]
    assert trace.action_tokens() == sum(mask)


@given(traces())
def test_what_the_policy_had_read_at_a_turn_is_a_prefix_of_the_trace_up_to_its_action(
    trace: Trace,
) -> None:
    ids = trace.token_ids()
    for index, turn in enumerate(trace.turns):
        prompt = trace.prompt_ids(index)
        assert ids[: len(prompt)] == prompt
        assert ids[len(prompt) : len(prompt) + len(turn.action_ids)] == turn.action_ids


def test_the_oldest_version_is_that_of_the_oldest_token_of_any_turn() -> None:
    one = Turn([1], [2, 3], [0.0, 0.0], [4, 5], "stop")
    two = Turn([1], [2, 3], [0.0, 0.0], [3, 9], "stop")
    trace = Trace("t", 0, 0, "toolbox", "train", 0, [one, two], [], 0.0, False, [])
    assert trace.oldest_version() == 3


@pytest.mark.parametrize(
    ("logprobs", "versions"), [([0.0], [1, 1]), ([0.0, 0.0], [1]), ([], []), ([0.0] * 3, [1] * 3)]
)
def test_an_action_token_without_its_log_prob_or_version_is_refused(
    logprobs: list[float], versions: list[int]
) -> None:
    message = f"2 action ids, {len(logprobs)} log-probs and {len(versions)} versions"
    with pytest.raises(ValueError, match=message):
        Turn([7], [8, 9], logprobs, versions, "stop")


@pytest.mark.parametrize("line", ["", "{}", '{"trace_id": 3}', "[1]"])
def test_a_line_that_is_no_trace_is_refused(line: str) -> None:
    with pytest.raises(ValidationError):
        trace_from_json(line)


def rewarded(reward: float, **fields: Any) -> Trace:
    turns = [Turn([1], [2], [-1.0], [0], "stop")] * 2
    return Trace("a", 0, 0, "t", "train", 0, turns, [], reward, False, [], **fields)


def test_a_group_has_equal_rewards_if_all_that_is_compared_is_equal() -> None:
    one = rewarded(1.0)
    assert equal_rewards([])
    assert equal_rewards([one, one])
    assert not equal_rewards([one, rewarded(0.0)])
    assert not equal_rewards([one, rewarded(1.0, turn_rewards=[1.0, 0.0])])
    worker, idle = (rewarded(reward, role="worker") for reward in (0.5, 0.0))
    assert equal_rewards([replace(one, others=[worker]), replace(one, others=[worker])])
    assert not equal_rewards([replace(one, others=[worker]), replace(one, others=[idle])])


def test_a_group_with_an_advantage_of_its_own_is_trained_unless_that_is_0() -> None:
    assert not equal_rewards([rewarded(1.0, advantage=0.5), rewarded(1.0, advantage=0.5)])
    assert not equal_rewards([rewarded(1.0, turn_advantages=[0.0, 0.5])])
    assert equal_rewards([rewarded(1.0, advantage=0.0), rewarded(0.0, advantage=0.0)])


def test_the_outcome_is_the_reward_without_those_of_turns() -> None:
    assert rewarded(0.3).outcome == 0.3
    assert rewarded(1.5, turn_rewards=[0.25, 0.25]).outcome == 1.0


def test_numbers_of_turns_are_one_for_each_or_none() -> None:
    with pytest.raises(ValueError, match="1 turn_advantages for 2 turns: give one number for each"):
        rewarded(1.0, turn_advantages=[1.0])

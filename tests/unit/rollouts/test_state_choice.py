"""Which turns teachers are shown: the best first, no state twice, the same choice every time.

What a state is worth: each sign lies between 0 and 1 and says what its name says.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.configs.replay import GateConfig
from composer_mesh.rollouts.consensus import ActionKey
from composer_mesh.rollouts.pairs import FrozenState, StudentState
from composer_mesh.rollouts.state_choice import (
    LONGEST_NAME,
    Novelty,
    QueryRounds,
    StateSignals,
    action_disagreement,
    entropy_sign,
    error_sign,
    reward_spread,
    select_states,
    situation,
    state_value,
    student_state,
)
from composer_mesh.rollouts.tool_calls import assistant_message, call_text
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn


def trace(name: str, actions: list[str], *, success: bool, errors: tuple[int, ...] = ()) -> Trace:
    messages: list[Message] = [{"role": "user", "content": f"question {name}"}]
    turns = []
    for place, text in enumerate(actions):
        messages += [assistant_message(text, f"call_{place}"), {"role": "tool", "content": "ok"}]
        ids = [ord(char) for char in text]
        turns.append(Turn([*name.encode(), place], ids, [0.0] * len(ids), [3] * len(ids), "stop"))
    sites = [ErrorSite(turn, "unknown_tool", "unknown_tool", {}) for turn in errors]
    group = 0
    return Trace(name, group, 0, "t", "train", 0, turns, messages[:-1], 0.0, success, sites)


def several() -> list[Trace]:
    call = call_text("lookup", {"key": "x"})
    return [
        trace("won", [call, "Answer: 1"], success=True),
        trace("lost", [call, "Answer: 2"], success=False),
        trace("recovered", [call, call, "Answer: 3"], success=True, errors=(1,)),
    ]


def chosen(traces: list[Trace], limit: int, seed: int) -> list[StudentState]:
    return select_states(traces, limit, random.Random(seed)).states


def test_error_turns_come_first_then_failed_episodes_then_the_rest() -> None:
    states = chosen(several(), 99, 0)
    where = [state.trace_id for state in states]
    assert (where[0], states[0].turn) == ("recovered", 1)
    assert set(where[1:3]) == {"lost"}
    assert set(where[3:]) == {"won", "recovered"}
    assert len(states) == 7


def test_the_limit_keeps_the_first() -> None:
    every = chosen(several(), 99, 0)
    assert chosen(several(), 3, 0) == every[:3]
    assert chosen(several(), 0, 0) == []


def test_the_choice_depends_on_the_traces_and_the_rng_but_not_on_their_order() -> None:
    one = chosen(several(), 4, 5)
    assert chosen(several()[::-1], 4, 5) == one
    orders = {tuple(s.state.state_id for s in chosen(several(), 9, seed)) for seed in range(20)}
    assert len(orders) > 1


def test_a_state_shows_what_was_said_before_its_action_and_nothing_later() -> None:
    lost = several()[1]
    state = student_state(lost, 1)
    assert state.state.messages == lost.messages[:3]
    assert state.context_ids == [
        *lost.turns[0].context_ids,
        *lost.turns[0].action_ids,
        *lost.turns[1].context_ids,
    ]
    assert (state.action_text, state.action_ids) == ("Answer: 2", lost.turns[1].action_ids)
    assert state.oldest_version == 3


def test_assistant_messages_of_the_prompt_are_no_actions() -> None:
    plain = trace("shots", ["Answer: 4"], success=False)
    shots: list[Message] = [
        {"role": "user", "content": "an example"},
        {"role": "assistant", "content": "Answer: 0"},
    ]
    shown = replace(plain, messages=[*shots, *plain.messages])
    state = student_state(shown, 0)
    assert state.action_text == "Answer: 4"
    assert state.state.messages[:2] == shots


def test_samples_that_act_alike_in_one_state_are_asked_about_once() -> None:
    call = call_text("lookup", {"key": "x"})
    first = trace("same", [call, "Answer: 1"], success=False)
    second = replace(first, trace_id="twin")
    assert len(chosen([first, second], 9, 0)) == 2


def test_what_the_student_did_before_is_part_of_its_context() -> None:
    actions = [call_text("lookup", {"key": key}) for key in ("x", "y")]
    said = [trace("same", [action, "Answer: 1"], success=False) for action in actions]
    states = chosen([said[0], replace(said[1], trace_id="other")], 9, 0)
    assert sorted(state.turn for state in states) == [0, 0, 1, 1]
    assert len({state.state.seed for state in states}) == 3


def test_a_turn_without_sampled_tokens_is_not_chosen() -> None:
    empty = trace("empty", ["", "Answer: 1"], success=False)
    assert [s.turn for s in chosen([empty], 9, 0)] == [1]


def test_seeds_differ_between_states_and_fit_31_bits() -> None:
    seeds = [s.state.seed for s in chosen(several(), 9, 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


ERRORS_ALONE = GateConfig(error=1, entropy=0, disagreement=0, novelty=0, min_value=0.5)


def test_states_below_the_gate_are_skipped_and_counted() -> None:
    selection = select_states(several(), 99, random.Random(0), ERRORS_ALONE)
    where = [(state.trace_id, state.turn) for state in selection.states]
    assert where[0] == ("recovered", 1)
    assert sorted(where[1:]) == [("lost", 0), ("lost", 1)]
    assert selection.values == [1.0, 0.5, 0.5]
    assert (selection.skipped, selection.distinct, selection.saved) == (4, 7, 4)
    cut = select_states(several(), 1, random.Random(0), ERRORS_ALONE)
    assert (cut.states, cut.skipped, cut.distinct) == (selection.states[:1], 4, 7)


@pytest.mark.parametrize(("limit", "saved"), [(0, 0), (3, 0), (4, 1), (7, 4), (99, 4)])
def test_a_skipped_state_saves_a_question_where_there_was_room_for_it(
    limit: int, saved: int
) -> None:
    assert select_states(several(), limit, random.Random(0), ERRORS_ALONE).saved == saved


def test_without_a_gate_nothing_is_skipped() -> None:
    selection = select_states(several(), 2, random.Random(0))
    assert (selection.skipped, selection.distinct, len(selection.states)) == (0, 7, 2)
    assert selection.values == sorted(selection.values, reverse=True)


def test_the_unsure_turn_comes_before_the_sure_one() -> None:
    gate = GateConfig(error=0, entropy=1, disagreement=0, novelty=0)
    plain = trace("t", ["Answer: 1", "Answer: 2"], success=False)
    sure, unsure = plain.turns
    unsure = replace(unsure, logprobs=[-2.0] * len(unsure.action_ids))
    selection = select_states([replace(plain, turns=[sure, unsure])], 9, random.Random(0), gate)
    assert [state.turn for state in selection.states] == [1, 0]


def test_where_the_group_disagrees_its_odd_one_comes_first() -> None:
    gate = GateConfig(error=0, entropy=0, disagreement=1, novelty=0)
    said = ["Answer: 1", "Answer: 1", "Answer: 1", "Answer: 2"]
    group = [
        replace(trace("same", [text], success=True), trace_id=f"s{i}")
        for i, text in enumerate(said)
    ]
    selection = select_states(group, 9, random.Random(0), gate)
    assert [state.action_text for state in selection.states] == ["Answer: 2", "Answer: 1"]
    assert selection.values == [0.5, pytest.approx(1 / 6)]
    winner = replace(group[0], reward=1.0)
    spread = select_states([winner, *group[1:]], 9, random.Random(0), gate)
    assert spread.values == [pytest.approx((1 + 0.75) / 2), pytest.approx((1 / 3 + 0.75) / 2)]


def test_groups_do_not_disagree_with_each_other() -> None:
    gate = GateConfig(error=0, entropy=0, disagreement=1, novelty=0)
    one = trace("same", ["Answer: 1"], success=True)
    other = replace(trace("same", ["Answer: 2"], success=True), trace_id="b", group_id=1)
    assert select_states([one, replace(other, reward=1.0)], 9, random.Random(0), gate).values == [
        0,
        0,
    ]


def test_what_was_asked_about_before_comes_later_but_only_if_the_caller_says_so() -> None:
    novelty = Novelty()
    gate = GateConfig(error=0, entropy=0, disagreement=0, novelty=1)
    first = select_states(several(), 1, random.Random(0), gate, novelty)
    again = select_states(several(), 1, random.Random(0), gate, novelty)
    assert again == first
    novelty.count_queries(first.states)
    later = select_states(several(), 1, random.Random(0), gate, novelty)
    assert later.states[0].situation != first.states[0].situation
    assert first.values == later.values == [1.0]


def test_one_question_answers_all_samples_that_stand_in_one_context() -> None:
    group = [
        replace(trace("same", [text], success=False), trace_id=text)
        for text in ("Answer: 1", "Answer: 2", "Answer: 3")
    ]
    states = chosen(group, 9, 0)
    assert len({state.action_text for state in states}) == 3
    assert len({state.state.seed for state in states}) == 1
    assert all(state.state.messages == states[0].state.messages for state in states)


@given(seed=st.integers(0, 99), limit=st.integers(0, 9), order=st.permutations(range(3)))
def test_the_same_arguments_choose_the_same_states(seed: int, limit: int, order: list[int]) -> None:
    traces, novelty = several(), Novelty()
    novelty.restore(["t: opening: answers: no error"] * 3)
    one, other = (
        select_states(some, limit, random.Random(seed), GateConfig(), novelty)
        for some in (traces, [traces[i] for i in order])
    )
    assert one == other
    assert len(one.states) == len(one.values) == min(limit, 7)


def test_a_trace_without_its_conversation_is_refused() -> None:
    bare = replace(several()[0], messages=[])
    with pytest.raises(ValueError, match="2 turns and 0 assistant messages"):
        student_state(bare, 0)


def siblings() -> list[Trace]:
    """Four rollouts of one prompt: two that part at the first turn, two at the second."""
    first, other = call_text("lookup", {"key": "x"}), call_text("lookup", {"key": "y"})
    ends = [(first, "Answer: 1"), (first, "Answer: 2"), (other, "Answer: 3"), (other, "Answer: 4")]
    found = [trace("same", [*actions], success=False) for actions in ends]
    return [replace(one, trace_id=f"{place}") for place, one in enumerate(found)]


def asked(limit: int, *differ: str) -> list[list[list[str]]]:
    """The rounds in which the siblings are asked, as actions, where teachers differ from some."""
    chosen = select_states(siblings(), limit, random.Random(0), order="first")
    rounds, found = QueryRounds(chosen), []
    while questions := rounds.next():
        found.append([sorted(state.action_text for state in states) for states in questions])
        for state in (state for states in questions for state in states):
            if state.action_text in differ:
                rounds.differs(state)
    return found


FIRST, OTHER = (call_text("lookup", {"key": key}) for key in "xy")


def test_by_first_divergence_contexts_are_asked_once_in_order_of_turn() -> None:
    opening, second = asked(9)
    assert opening == [[FIRST, OTHER]]
    assert sorted(second) == [["Answer: 1", "Answer: 2"], ["Answer: 3", "Answer: 4"]]


def test_what_a_rollout_did_after_its_first_divergence_is_not_asked() -> None:
    assert asked(9, FIRST) == [[[FIRST, OTHER]], [["Answer: 3", "Answer: 4"]]]
    assert asked(9, FIRST, OTHER) == [[[FIRST, OTHER]]]


def test_the_limit_is_of_contexts_that_are_asked() -> None:
    assert len(asked(2)[1]) == 1
    assert asked(2, FIRST) == [[[FIRST, OTHER]], [["Answer: 3", "Answer: 4"]]]
    assert asked(0) == []
    chosen = select_states(siblings(), 2, random.Random(0), order="first")
    assert (chosen.most, [state.turn for state in chosen.planned]) == (2, [0, 1])
    assert chosen.cut(1).most == 1


def test_where_fewer_may_be_asked_than_there_are_turns_the_value_says_which() -> None:
    """A long rollout whose last action failed."""
    long = trace("long", [call_text("lookup", {"key": f"{n}"}) for n in range(9)], success=False)
    late = replace(long, error_sites=[ErrorSite(8, "unknown_tool", "unknown_tool", {})])

    def turns(limit: int) -> list[int]:
        rounds = QueryRounds(select_states([late], limit, random.Random(0), order="first"))
        return [states[0].turn for asked in iter(rounds.next, []) for states in asked]

    assert turns(1) == [8]
    assert turns(3)[-1] == 8
    assert turns(3) == sorted(turns(3))
    assert turns(9) == list(range(9))


def test_by_value_all_states_are_asked_at_once() -> None:
    chosen = select_states(several(), 4, random.Random(0))
    rounds = QueryRounds(chosen)
    assert rounds.next() == [[state] for state in chosen.states]
    rounds.differs(chosen.states[0])
    assert rounds.next() == []


SHARES = st.floats(0, 1)
WEIGHTS = st.floats(0, 1e12)


def bare_trace(success: bool, *errors: tuple[int, str]) -> Trace:
    sites = [ErrorSite(turn, kind, kind, {}) for turn, kind in errors]
    return Trace("t", 0, 0, "toolbox", "train", 0, [], [], 0.0, success, sites)


def words(text: str) -> ActionKey:
    return ActionKey("words", text)


def test_an_error_is_worth_most_then_a_failed_episode_then_nothing() -> None:
    assert error_sign(bare_trace(True, (1, "wrong_type")), 1) == 1.0
    assert error_sign(bare_trace(False, (1, "wrong_type")), 0) == 0.5
    assert error_sign(bare_trace(True, (1, "wrong_type")), 0) == 0.0


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
    of = bare_trace(False, (0, "malformed_call"), (1, "unknown_tool"))
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
    resumed = Novelty()
    resumed.restore(["a"] * 3)
    assert resumed.sign("a") == 0.25


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

"""Which turns teachers are shown: errors first, no state twice, the same choice every time."""

import random

import pytest

from composer_mesh.rollouts.state_choice import select_states, student_state
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


def test_error_turns_come_first_then_failed_episodes_then_the_rest() -> None:
    states = select_states(several(), 99, random.Random(0))
    where = [state.trace_id for state in states]
    assert (where[0], states[0].turn) == ("recovered", 1)
    assert set(where[1:3]) == {"lost"}
    assert set(where[3:]) == {"won", "recovered"}
    assert len(states) == 7


def test_the_limit_keeps_the_first() -> None:
    every = select_states(several(), 99, random.Random(0))
    assert select_states(several(), 3, random.Random(0)) == every[:3]
    assert select_states(several(), 0, random.Random(0)) == []


def test_the_choice_depends_on_the_traces_and_the_rng_but_not_on_their_order() -> None:
    one = select_states(several(), 4, random.Random(5))
    assert select_states(several()[::-1], 4, random.Random(5)) == one
    orders = {
        tuple(s.state.state_id for s in select_states(several(), 9, random.Random(seed)))
        for seed in range(20)
    }
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
    shown = Trace(**{**_fields(plain), "messages": [*shots, *plain.messages]})
    state = student_state(shown, 0)
    assert state.action_text == "Answer: 4"
    assert state.state.messages[:2] == shots


def test_samples_that_act_alike_in_one_state_are_asked_about_once() -> None:
    call = call_text("lookup", {"key": "x"})
    first = trace("same", [call, "Answer: 1"], success=False)
    second = Trace(**{**_fields(first), "trace_id": "twin"})
    assert len(select_states([first, second], 9, random.Random(0))) == 2


def test_a_turn_without_sampled_tokens_is_not_chosen() -> None:
    empty = trace("empty", ["", "Answer: 1"], success=False)
    assert [s.turn for s in select_states([empty], 9, random.Random(0))] == [1]


def test_seeds_differ_between_states_and_fit_31_bits() -> None:
    seeds = [s.state.seed for s in select_states(several(), 9, random.Random(1))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_trace_without_its_conversation_is_refused() -> None:
    bare = Trace(**{**_fields(several()[0]), "messages": []})
    with pytest.raises(ValueError, match="2 turns and 0 assistant messages"):
        student_state(bare, 0)


def _fields(of: Trace) -> dict:
    return {name: getattr(of, name) for name in Trace.__dataclass_fields__}

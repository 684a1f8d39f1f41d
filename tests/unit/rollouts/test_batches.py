"""Batches: which samples, views and pairs a step gets, as plain ids.

Alignment: the hint moves the teacher's rows, and nothing else differs between the two.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.channels.policy import policy_sample
from composer_mesh.channels.replay import pair_samples
from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.rollouts.alignment import HintedView, MisalignedError, hinted_view
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.pairs import PreferencePair, Provenance, TeacherVote
from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.tasks.toolbox import ToolboxTask

LONG = 10_000


@pytest.fixture(scope="module")
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


def trace_of(chat: ChatFormat, name: str, turns: int, errors: list[int]) -> Trace:
    made = []
    for turn in range(turns):
        opening = [{"role": "user", "content": f"question {name}"}]
        first = chat.first_prompt(opening)
        later = chat.continuation([{"role": "tool", "content": "4"}], chat.stop_ids[:1])
        ids = chat.action(f"action {turn}")
        logprobs = [-(turn + place / 100) for place in range(len(ids))]
        made.append(Turn(later if turn else first, ids, logprobs, [turn] * len(ids), "stop"))
    sites = [ErrorSite(turn, "no_answer", "no_answer", {}) for turn in errors]
    return Trace(name, 0, 0, "toolbox", "train", 0, made, [], 0.0, False, sites)


def views_of(
    traces: list[Trace], chat: ChatFormat, limit: int, max_context: int
) -> list[HintedView]:
    return hinted_sites(traces, chat, lambda trace: "57.25", limit, max_context).views


def test_a_hint_that_holds_the_verified_answer_is_refused_and_counted(chat: ChatFormat) -> None:
    leaking = ErrorSite(0, "wrong_answer", "wrong_answer", {"answer": "57.25"})
    trace = replace(trace_of(chat, "a", 2, [1]), error_sites=[leaking])
    other = trace_of(chat, "b", 2, [0])
    found = hinted_sites([trace, other], chat, lambda trace: "57.25", 9, LONG)
    assert [view.trace_id for view in found.views] == ["b"]
    assert found.refused == 1


@given(st.integers(1, 4), st.floats(-3, 3))
def test_a_sample_has_one_mask_and_log_prob_for_each_id(
    chat: ChatFormat, turns: int, advantage: float
) -> None:
    trace = trace_of(chat, "a", turns, [])
    sample = policy_sample(trace, advantage)
    assert sample.ids == trace.token_ids()
    assert len(sample.ids) == len(sample.mask) == len(sample.logprobs)
    sampled = [value for value, own in zip(sample.logprobs, sample.mask, strict=True) if own]
    assert sampled == [value for turn in trace.turns for value in turn.logprobs]
    assert {v for v, own in zip(sample.logprobs, sample.mask, strict=True) if not own} == {0.0}
    assert (sample.trace_id, sample.advantage) == ("a", advantage)


def test_a_turn_that_is_only_context_has_no_trained_id(chat: ChatFormat) -> None:
    trace = trace_of(chat, "a", 2, [])
    shown, last = replace(trace.turns[0], trained=False), trace.turns[1]
    sample = policy_sample(replace(trace, turns=[shown, last]), 1.0)
    assert len(sample.ids) == len(sample.mask)
    trained = [token for token, own in zip(sample.ids, sample.mask, strict=True) if own]
    assert trained == last.action_ids
    assert [one for one in sample.logprobs if one] == last.logprobs


def test_sites_are_taken_round_by_round_over_the_traces(chat: ChatFormat) -> None:
    traces = [
        trace_of(chat, "a", 4, [0, 1, 2, 3]),
        trace_of(chat, "b", 2, []),
        trace_of(chat, "c", 3, [2]),
        trace_of(chat, "d", 3, [0, 2]),
    ]
    views = views_of(traces, chat, 99, LONG)
    assert [(view.trace_id, view.turn) for view in views] == [
        *[("a", 0), ("c", 2), ("d", 0)],
        *[("a", 1), ("d", 2)],
        *[("a", 2), ("a", 3)],
    ]


@given(st.lists(st.sets(st.integers(0, 2)), max_size=5), st.integers(0, 12))
def test_a_limit_keeps_the_first_views_and_never_more(
    chat: ChatFormat, errors: list[set[int]], limit: int
) -> None:
    traces = [trace_of(chat, str(n), 3, sorted(turns)) for n, turns in enumerate(errors)]
    every = views_of(traces, chat, 99, LONG)
    assert len(every) == sum(len(turns) for turns in errors)
    assert views_of(traces, chat, limit, LONG) == every[:limit]


def test_a_view_that_is_too_long_is_left_out_and_takes_no_place(chat: ChatFormat) -> None:
    traces = [trace_of(chat, "a", 3, [2, 0]), trace_of(chat, "b", 3, [0])]
    every = {(v.trace_id, v.turn): v for v in views_of(traces, chat, 99, LONG)}
    context = len(every["a", 2].teacher_ids) - 1
    kept = views_of(traces, chat, 2, context)
    assert [(view.trace_id, view.turn) for view in kept] == [("b", 0), ("a", 0)]
    assert all(len(view.teacher_ids) <= context for view in kept)


def test_choosing_views_leaves_the_traces_as_they_were(chat: ChatFormat) -> None:
    traces = [trace_of(chat, "a", 3, [0, 1])]
    assert views_of(traces, chat, 9, LONG) == views_of(traces, chat, 9, LONG)
    assert len(traces[0].error_sites) == 2


def pair_of(name: str, context: int, chosen: str, rejected: list[int]) -> PreferencePair:
    return PreferencePair(
        pair_id=name,
        state_id=name,
        trace_id=name,
        turn=0,
        messages=[],
        context_ids=list(range(context)),
        chosen_text=chosen,
        chosen_message=assistant_message(chosen, "call"),
        rejected_text="",
        rejected_message=assistant_message("", "call"),
        rejected_ids=rejected,
        rejected_version=0,
        teachers=["a", "b"],
        votes=2,
        asked=2,
        usd=0.0,
        usd_known=True,
    )


def test_a_pair_holds_the_ids_that_the_student_sampled_and_the_chosen_text_encoded(
    chat: ChatFormat,
) -> None:
    sample = pair_samples([pair_of("p", 5, "Answer: 4", [3, 1])], chat, LONG)[0]
    assert sample.context_ids == [0, 1, 2, 3, 4]
    assert sample.rejected_ids == [3, 1]
    assert sample.chosen_ids[-1] == chat.stop_ids[0]
    assert chat.action_text(sample.chosen_ids) == "Answer: 4"


def test_a_pair_is_left_out_when_either_answer_does_not_fit(chat: ChatFormat) -> None:
    answer = len(chat.action("Answer: 4"))
    pairs = [
        pair_of("fits", 10, "Answer: 4", [0] * answer),
        pair_of("long context", 11, "Answer: 4", [0]),
        pair_of("long rejected", 10, "Answer: 4", [0] * (answer + 1)),
        pair_of("long chosen", 10, "Answer: 4 4 4 4", [0]),
    ]
    kept = pair_samples(pairs, chat, 10 + answer)
    assert [sample.pair_id for sample in kept] == ["fits"]


def test_a_step_counts_the_tokens_that_its_channels_are_divided_by(chat: ChatFormat) -> None:
    traces = [trace_of(chat, "a", 3, [0, 2]), trace_of(chat, "b", 1, [])]
    samples = [policy_sample(trace, 1.0) for trace in traces]
    batch = StepBatch(0, samples, views_of(traces, chat, 9, LONG), [])
    assert batch.action_tokens == sum(trace.action_tokens() for trace in traces)
    assert batch.sdpo_tokens == sum(len(traces[0].turns[turn].action_ids) for turn in (0, 2))


def test_pairs_weigh_the_same_unless_by_the_teachers_margin(chat: ChatFormat) -> None:
    other = Provenance(2, (TeacherVote("c", "number", "5"),))
    alone = pair_of("p", 5, "Answer: 4", [3, 1])
    contested = replace(alone, votes=3, asked=4, provenance=other)
    pairs = [contested, pair_of("q", 5, "Answer: 4", [3, 1])]
    assert [sample.weight for sample in pair_samples(pairs, chat, LONG)] == [1.0, 1.0]
    weighed = pair_samples(pairs, chat, LONG, "margin")
    assert [sample.weight for sample in weighed] == [0.25, 1.0]


PROMPT = [7, 8]
IDS = st.lists(st.integers(0, 99), max_size=8)


def hinted_trace(turns: list[tuple[list[int], list[int]]], prompt: list[int] = PROMPT) -> Trace:
    """Contexts without their generation prompt, and actions."""
    made = [
        Turn([*context, *prompt], action, [-1.0] * len(action), [0] * len(action), "stop")
        for context, action in turns
    ]
    return Trace("t", 0, 0, "toolbox", "train", 0, made, [], 0.0, False, [])


TRACES = st.lists(st.tuples(IDS, IDS.filter(bool)), min_size=1, max_size=4).map(hinted_trace)


@given(TRACES, st.lists(IDS, min_size=4, max_size=4))
def test_every_turn_has_its_own_offset_whatever_hints_the_others_got(
    trace: Trace, hints: list[list[int]]
) -> None:
    views = [
        hinted_view(trace, turn, hint, PROMPT)
        for turn, hint in zip(range(len(trace.turns)), hints, strict=False)
    ]
    assert [view.offset for view in views] == [len(hint) for hint in hints[: len(views)]]
    rows = [row for view in views for row in view.student_rows]
    assert len(set(rows)) == len(rows) == trace.action_tokens()


@given(TRACES, IDS, st.data())
def test_what_comes_after_a_turn_does_not_change_its_view(
    trace: Trace, hint: list[int], data: st.DataObject
) -> None:
    turn = data.draw(st.integers(0, len(trace.turns) - 1))
    later = data.draw(TRACES)
    turns = [*trace.turns[: turn + 1], *later.turns]
    other = Trace("t", 0, 0, "toolbox", "train", 0, turns, [], 1.0, True, [])
    assert hinted_view(other, turn, hint, PROMPT) == hinted_view(trace, turn, hint, PROMPT)


@pytest.mark.parametrize("prompt", [[8, 7], [1, 2, 3, 7, 8], [7]])
def test_a_context_that_does_not_end_with_the_generation_prompt_is_refused(
    prompt: list[int],
) -> None:
    trace = hinted_trace([([1], [2])])
    with pytest.raises(
        MisalignedError, match=r"turn 0 of t ends with .*, not the generation prompt"
    ):
        hinted_view(trace, 0, [5], prompt)


def test_a_turn_without_an_action_has_no_view_and_the_error_names_it() -> None:
    trace = hinted_trace([([1], [2]), ([3], [])])
    with pytest.raises(MisalignedError, match=r"turn 1 of t has no action token.*leave the turn"):
        hinted_view(trace, 1, [5], PROMPT)


def random_trace(rng: random.Random, turns: int) -> Trace:
    def ids(longest: int) -> list[int]:
        return [rng.randrange(300) for _ in range(rng.randint(1, longest))]

    return hinted_trace([(ids(12), ids(9)) for _ in range(turns)])


def student_logits(model: Any, trace: Trace) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([trace.token_ids()])).logits[0]


def views_of_turns(traces: list[Trace], hint: list[int]) -> list[tuple[Trace, HintedView]]:
    return [
        (trace, hinted_view(trace, turn, hint, PROMPT))
        for trace in traces
        for turn in range(len(trace.turns))
    ]


@pytest.mark.parametrize("budget", [64, 100, 4096])
def test_with_an_empty_hint_the_teacher_says_what_the_student_says(
    build_model: Any, rng: random.Random, budget: int
) -> None:
    model, traces = build_model(1), [random_trace(rng, turns) for turns in (1, 3, 2)]
    pairs = views_of_turns(traces, [])
    states = hinted_states(model, [view for _, view in pairs], budget)
    with torch.no_grad():
        teacher = model.lm_head(states)
    student = torch.cat([student_logits(model, t)[view.student_rows] for t, view in pairs])
    torch.testing.assert_close(teacher, student, atol=1e-5, rtol=1e-5)


def test_a_hint_changes_what_the_teacher_says_and_a_longer_one_changes_it_again(
    build_model: Any, rng: random.Random
) -> None:
    model, trace = build_model(1), random_trace(rng, 2)
    said = [
        hinted_states(model, [view for _, view in views_of_turns([trace], hint)], 4096)
        for hint in ([], [5, 6], [5, 6, 9])
    ]
    assert said[0].shape == said[1].shape == said[2].shape
    assert (said[0] - said[1]).abs().max() > 0.1
    assert (said[1] - said[2]).abs().max() > 0.1


def test_the_teachers_rows_come_in_the_order_of_the_views(
    build_model: Any, rng: random.Random
) -> None:
    model, traces = build_model(1), [random_trace(rng, turns) for turns in (3, 1, 2)]
    views = [view for _, view in views_of_turns(traces, [4, 4, 4])]
    together = hinted_states(model, views, 70)
    alone = torch.cat([hinted_states(model, [view], 70) for view in views])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)

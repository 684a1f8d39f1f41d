"""Batches: which samples, views and pairs a step gets, as plain ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.channels.policy import policy_sample
from composer_mesh.channels.replay import pair_samples
from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.rollouts.alignment import HintedView
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

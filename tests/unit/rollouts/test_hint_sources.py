"""Sources of hints: which turns get one, from where, in which order, and what is left out.

The order of error sites, and the right actions that a hinted teacher is compared at.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hint_traces import NO_JSON, QUIT, SCRIPTS, WRONG_KEY, group_of, play

from composer_mesh.channels.sdpo import HintedSites, hint_sources, hinted_sites
from composer_mesh.configs.sdpo import HintsConfig, SitesConfig
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_sources import (
    Hint,
    HintCounts,
    HintSources,
    Place,
    WrittenHint,
    right_sibling,
    shortened,
    surprisal,
)
from composer_mesh.rollouts.hints import chosen_sibling
from composer_mesh.rollouts.leaks import holds_answer
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

NOBODY = "no answer looks like this"


@pytest.fixture(scope="module")
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


@pytest.fixture(scope="module")
def long_index(toolbox: ToolboxTask) -> int:
    """An episode whose plan has three calls."""
    return next(index for index in range(200) if len(answers(toolbox, index)) == 3)


def answers(task: ToolboxTask, index: int) -> list[str]:
    """The tools' answers on the right way through an episode."""
    session = SyncSession(task, task.episode("train", index))
    while not session.step(task.expert(session.messages)).done:
        pass
    return [m["content"] for m in session.messages if m["role"] == "tool"]


def sources_of(
    chat: ChatFormat,
    *sources: str,
    answer: str = NOBODY,
    written: dict[Place, WrittenHint] | None = None,
    **options: Any,
) -> HintSources:
    config = HintsConfig(sources=sources or ("error",), **options)
    return hint_sources(chat, lambda trace: answer, config, written or {})


def hints_of(
    sources: HintSources, trace: Trace, turn: int, group: list[Trace]
) -> tuple[list[Hint], HintCounts]:
    counts = HintCounts()
    return list(sources.hints(trace, turn, group, counts)), counts


def test_the_order_of_sources_is_the_preference_of_each_turn(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed, right = group_of(toolbox, chat, 0, ["fails twice", "right"])
    sources = sources_of(chat, "feedback", "sibling", "error")
    first, _ = hints_of(sources, failed, 0, [failed, right])
    assert [hint.source for hint in first] == ["feedback", "sibling", "error"]
    second, _ = hints_of(sources, failed, 1, [failed, right])
    assert [hint.source for hint in second] == ["feedback", "error"]
    last, _ = hints_of(sources, failed, 2, [failed, right])
    assert [hint.source for hint in last] == ["error"]  # nobody answers the last action


def test_feedback_is_what_the_environment_said_at_the_error(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed = play(toolbox, chat, 0, [WRONG_KEY, NO_JSON, QUIT])
    sources = sources_of(chat, "feedback")
    said = [hints_of(sources, failed, turn, [failed])[0] for turn in (0, 1)]
    assert said[0][0].text.endswith("answered with: error: no key lamp value")
    assert said[1][0].text.endswith("answered with: error: the call is not valid JSON")


def test_a_sibling_is_shown_at_the_first_error_or_else_at_the_last_turn(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed, right = group_of(toolbox, chat, 0, ["fails twice", "right"])
    sources = sources_of(chat, "sibling")
    assert sources.turns(failed, [failed, right]) == [0]
    silent = replace(failed, error_sites=[])
    assert sources.turns(silent, [silent, right]) == [2]
    assert sources.turns(right, [failed, right]) == []


def test_without_a_successful_sibling_nobody_is_shown(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed, right = group_of(toolbox, chat, 0, ["fails twice", "right"])
    other = replace(right, group_id=7)
    for group in ([failed], [failed, failed], [failed, other], [failed, replace(right, turns=[])]):
        assert sources_of(chat, "sibling").turns(failed, group) == []


def test_the_sibling_is_never_the_sample_itself_and_does_not_depend_on_order(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    names = ["right", "stumbles", "quits", "right"]
    group = group_of(toolbox, chat, 0, names)
    for trace in group:
        for seed in range(5):
            shuffled = random.Random(seed).sample(group, len(group))
            chosen = chosen_sibling(trace, shuffled)
            assert chosen is not None
            assert chosen.trace_id == group[3 if trace is group[0] else 0].trace_id


def test_a_demonstration_holds_what_worked_before_the_answer_and_says_what_is_trimmed(
    chat: ChatFormat, toolbox: ToolboxTask, long_index: int
) -> None:
    failed, stumbling = group_of(toolbox, chat, long_index, ["quits", "stumbles"])
    answer = toolbox.verified_answer(toolbox.episode("train", long_index))
    results = answers(toolbox, long_index)
    sources = sources_of(chat, "sibling", answer=answer)
    (hint,), counts = hints_of(sources, failed, 0, [failed, stumbling])
    assert hint.text.count('"name"') == len(results)
    assert f"gave {results[0]}." in hint.text
    assert hint.text.endswith("The rest is left out. Do the next steps yourself.")
    assert "lamp value" not in hint.text
    assert not holds_answer(hint.text, answer)
    assert counts.refused == 0


def test_a_demonstration_ends_before_the_first_line_that_tells_the_answer(
    chat: ChatFormat, toolbox: ToolboxTask, long_index: int
) -> None:
    failed, right = group_of(toolbox, chat, long_index, ["quits", "right"])
    results = answers(toolbox, long_index)
    sources = sources_of(chat, "sibling", answer=results[0])
    (hint,), _ = hints_of(sources, failed, 0, [failed, right])
    assert hint.text.count('"name"') == 1
    assert "gave" not in hint.text


def test_a_demonstration_whose_first_call_tells_the_answer_is_refused_and_the_next_source_used(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed, right = group_of(toolbox, chat, 0, ["quits", "right"])
    name = right.messages[1]["tool_calls"][0]["function"]["name"]
    sources = sources_of(chat, "sibling", "error", answer=name)
    hints, counts = hints_of(sources, failed, 0, [failed, right])
    assert [hint.source for hint in hints] == ["error"]
    assert counts.refused == 1


def test_a_sibling_that_answers_at_once_shows_nothing(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed, right = group_of(toolbox, chat, 0, ["quits", "right"])
    lucky = replace(right, turns=right.turns[-1:], messages=[right.messages[0], right.messages[-1]])
    hints, counts = hints_of(sources_of(chat, "sibling"), failed, 0, [failed, lucky])
    assert hints == []
    assert counts == HintCounts()


def test_a_writers_words_come_first_and_the_template_stands_behind_them(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed = play(toolbox, chat, 0, SCRIPTS["quits"])
    asks = {"writer": "llm", "llm": {"kind": "builtin"}}
    written: dict[Place, WrittenHint] = {(failed.trace_id, 0): WrittenHint("Look again.", "llm")}
    hints, _ = hints_of(sources_of(chat, written=written, **asks), failed, 0, [failed])
    assert [(hint.text, hint.wording) for hint in hints] == [
        ("Hint: Look again.", "llm"),
        ("Hint: Do not give up. Call the next tool.", "fallback"),
    ]
    silent, _ = hints_of(sources_of(chat, **asks), failed, 0, [failed])
    assert [hint.wording for hint in silent] == ["fallback"]
    plain, _ = hints_of(sources_of(chat), failed, 0, [failed])
    assert [hint.wording for hint in plain] == ["template"]


def test_a_writers_words_that_tell_the_answer_are_refused_for_the_template(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed = play(toolbox, chat, 0, SCRIPTS["quits"])
    written: dict[Place, WrittenHint] = {(failed.trace_id, 0): WrittenHint("It is twelve.", "llm")}
    config = HintsConfig(writer="llm", llm={"kind": "builtin"})  # type: ignore[arg-type]
    found = hinted_sites([failed], chat, lambda trace: "12", 9, 10_000, config, written)
    assert len(found.views) == 1
    assert (found.counts.refused, found.counts.llm, found.counts.fallback) == (1, 0, 1)


def test_a_run_has_its_own_templates(chat: ChatFormat, toolbox: ToolboxTask) -> None:
    failed = play(toolbox, chat, 0, SCRIPTS["quits"])
    sources = sources_of(chat, templates={"no_answer": "Never stop."})
    assert hints_of(sources, failed, 0, [failed])[0][0].text == "Hint: Never stop."


def test_a_cut_hint_is_counted_and_checked_after_the_cut(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    failed = play(toolbox, chat, 0, SCRIPTS["quits"])
    sources = sources_of(chat, max_tokens=8)
    (hint,), counts = hints_of(sources, failed, 0, [failed])
    assert chat.content_tokens(hint.text) <= 8
    assert "Hint: Do not give up. Call the next tool.".startswith(hint.text)
    assert counts.cut == 1


@pytest.mark.parametrize("limit", [1, 2, 5, 9, 30])
def test_a_shortened_text_is_the_longest_beginning_that_fits(chat: ChatFormat, limit: int) -> None:
    for text in ("one two three four five six", "x" * 40, "ü <|im_start|> <|im_end|>", "125"):
        short, was_cut = shortened(text, limit, chat.content_tokens)
        assert text.startswith(short)
        assert chat.content_tokens(short) <= limit
        assert was_cut == (short != text)


def sites(traces: list[Trace], chat: ChatFormat, max_context: int, *sources: str) -> HintedSites:
    config = HintsConfig(sources=sources)
    return hinted_sites(traces, chat, lambda trace: NOBODY, 99, max_context, config)


def test_a_hint_that_does_not_fit_makes_room_for_the_next_source(
    chat: ChatFormat, toolbox: ToolboxTask, long_index: int
) -> None:
    group = group_of(toolbox, chat, long_index, ["quits", "right"])
    both = sites(group, chat, 10_000, "sibling", "error")
    assert (both.counts.sibling, both.counts.template) == (1, 0)
    tight = sites(group, chat, len(both.views[0].teacher_ids) - 1, "sibling", "error")
    assert (tight.counts.sibling, tight.counts.template, tight.counts.too_long) == (0, 1, 1)
    assert tight.refused == 1


def test_a_turn_with_several_errors_gets_one_hint(chat: ChatFormat, toolbox: ToolboxTask) -> None:
    failed = play(toolbox, chat, 0, SCRIPTS["quits"])
    doubled = replace(failed, error_sites=[*failed.error_sites, *failed.error_sites])
    found = sites([doubled], chat, 10_000, "error", "feedback")
    assert [view.turn for view in found.views] == [0]
    assert found.counts.shown == 1


@pytest.mark.parametrize(
    ("key", "data", "reason"),
    [
        ("missing_key", {"key": "a"}, "hint template 'missing_key' names the field 'keys'"),
        ("another", {}, "no hint template 'another'"),
    ],
)
def test_a_site_whose_hint_cannot_be_written_gets_none_and_others_theirs(
    chat: ChatFormat, toolbox: ToolboxTask, key: str, data: dict[str, str], reason: str
) -> None:
    first, other = group_of(toolbox, chat, 0, ["quits", "quits"])
    site = replace(first.error_sites[0], hint_template_key=key, data=data)
    broken = replace(first, error_sites=[site])
    found = hinted_sites([broken, other], chat, lambda trace: NOBODY, 9, 10_000)
    assert [view.trace_id for view in found.views] == [other.trace_id]
    assert found.counts.metrics()["hints/unwritten"] == 1
    assert [fault[: len(reason)] for fault in found.counts.faults] == [reason]


def test_a_writers_text_is_used_where_the_template_lacks_a_fact(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    (trace,) = group_of(toolbox, chat, 0, ["quits"])
    site = replace(trace.error_sites[0], hint_template_key="missing_key", data={})
    broken = replace(trace, error_sites=[site])
    written = {(trace.trace_id, site.turn): WrittenHint("Look again.", "llm")}
    hints, counts = hints_of(sources_of(chat, written=written), broken, site.turn, [broken])
    assert [hint.text for hint in hints] == ["Hint: Look again."]
    assert counts.unwritten == 1


def test_a_turn_whose_source_fails_still_has_the_other_sources(
    chat: ChatFormat, toolbox: ToolboxTask
) -> None:
    (trace,) = group_of(toolbox, chat, 0, ["quits"])
    broken = replace(trace, messages=[{"content": "no role"}, *trace.messages])
    turn = trace.error_sites[0].turn
    hints, counts = hints_of(sources_of(chat, "feedback", "error"), broken, turn, [broken])
    assert [hint.source for hint in hints] == ["error"]
    assert list(counts.faults) == ["the feedback hint failed with KeyError: 'role'"]


LONG = 10_000


def trace_of(
    chat: ChatFormat,
    name: str,
    actions: list[str],
    errors: list[int],
    logprob: float = -1.0,
    **changes: Any,
) -> Trace:
    """A rollout of one prompt, in which every action is answered alike."""
    turns = []
    for turn, action in enumerate(actions):
        first = chat.first_prompt([{"role": "user", "content": "question"}])
        later = chat.continuation([{"role": "tool", "content": "4"}], chat.stop_ids[:1])
        ids = chat.action(action)
        logprobs = [logprob * (1 + turn)] * len(ids)
        turns.append(Turn(later if turn else first, ids, logprobs, [0] * len(ids), "stop"))
    sites = [ErrorSite(turn, "no_answer", "no_answer", {}) for turn in errors]
    trace = Trace(name, 0, 0, "toolbox", "train", 0, turns, [], 0.0, False, sites)
    return replace(trace, **changes)


def chosen(chat: ChatFormat, traces: list[Trace], **choice: Any) -> list[tuple[str, int, bool]]:
    config = SitesConfig(**choice)
    found = hinted_sites(traces, chat, lambda _: None, 99, LONG, choice=config)
    return [(view.trace_id, view.turn, view.compared) for view in found.views]


def test_first_takes_the_earliest_error_of_each_rollout(chat: ChatFormat) -> None:
    traces = [trace_of(chat, "a", ["x", "y", "z"], [2, 1]), trace_of(chat, "b", ["x"], [0])]
    assert chosen(chat, traces, sites="first") == [("a", 1, False), ("b", 0, False)]


def test_surprise_takes_the_least_likely_actions_first(chat: ChatFormat) -> None:
    sure = trace_of(chat, "a", ["x", "y"], [0, 1], logprob=-0.1)
    unsure = trace_of(chat, "b", ["x", "y"], [0, 1], logprob=-2.0)
    assert surprisal(unsure, 1) == pytest.approx(4.0)
    assert [place[:2] for place in chosen(chat, [sure, unsure], sites="surprise")] == [
        ("b", 1),
        ("b", 0),
        ("a", 1),
        ("a", 0),
    ]


def test_a_failed_turn_without_an_action_token_is_no_site(chat: ChatFormat) -> None:
    trace = trace_of(chat, "a", ["x", "y"], [0, 1])
    silent = replace(trace.turns[0], action_ids=[], logprobs=[], versions=[])
    trace = replace(trace, turns=[silent, trace.turns[1]])
    assert chosen(chat, [trace], advantage_sites=9) == [("a", 1, False)]


def test_a_right_action_is_compared_in_the_contexts_of_the_failed_one(chat: ChatFormat) -> None:
    failed = trace_of(chat, "a", ["same", "wrong"], [1])
    right = trace_of(chat, "b", ["same", "right", "more"], [], success=True, reward=1.0)
    choice = SitesConfig(advantage_sites=4)
    views = hinted_sites([failed, right], chat, lambda _: None, 9, LONG, choice=choice).views
    hinted, compared = views
    action = right.turns[1].action_ids
    assert (compared.trace_id, compared.turn, compared.compared) == ("b", 1, True)
    assert compared.targets == action
    size = len(failed.turns[1].action_ids)
    assert compared.teacher_ids == hinted.teacher_ids[:-size] + action
    ids = right.token_ids()
    assert [ids[row + 1] for row in compared.student_rows] == action
    assert [compared.teacher_ids[row + 1] for row in compared.teacher_rows] == action
    assert compared.offset == hinted.offset > 0


def test_what_is_compared_is_neither_distilled_nor_counted_as_such(chat: ChatFormat) -> None:
    failed = trace_of(chat, "a", ["wrong"], [0])
    right = trace_of(chat, "b", ["right"], [], success=True)
    assert chosen(chat, [failed, right]) == [("a", 0, False)]
    assert chosen(chat, [failed, right], advantage_sites=1) == [("a", 0, False), ("b", 0, True)]


def test_a_right_action_is_compared_once_and_at_most_so_many_are(chat: ChatFormat) -> None:
    failed = [trace_of(chat, name, ["wrong " + name, "no"], [0, 1]) for name in "abc"]
    right = trace_of(chat, "d", ["right", "yes"], [], success=True)
    compared = [place for place in chosen(chat, [*failed, right], advantage_sites=9) if place[2]]
    assert compared == [("d", 0, True)]
    other = trace_of(chat, "e", ["wrong a", "yes"], [], reward=2.0, success=True)
    every = chosen(chat, [failed[0], right, other], advantage_sites=9)
    assert [place for place in every if place[2]] == [("d", 0, True), ("e", 1, True)]
    few = chosen(chat, [failed[0], right, other], advantage_sites=1)
    assert [place for place in few if place[2]] == [("d", 0, True)]


def test_only_a_sibling_that_is_known_to_be_right_is_compared(chat: ChatFormat) -> None:
    failed = trace_of(chat, "a", ["same", "wrong"], [1])
    success = trace_of(chat, "b", ["same", "right"], [], success=True)
    group = {
        "another context": trace_of(chat, "c", ["other", "right"], [], success=True),
        "the same action": trace_of(chat, "d", ["same", "wrong"], [], success=True),
        "an error of its own": trace_of(chat, "e", ["same", "right"], [1], success=True),
        "screened": replace(success, trace_id="f", screened=True),
        "another role": replace(success, trace_id="g", role="judge"),
        "too short": trace_of(chat, "h", ["same"], [], success=True),
        "no success": replace(success, trace_id="i", success=False),
    }
    for why, one in group.items():
        assert right_sibling(failed, 1, [failed, one], "success") is None, why
    assert right_sibling(failed, 1, [failed, *group.values(), success], "success") == success
    assert right_sibling(failed, 1, [failed, group["no success"]], "no_error") is not None
    better = replace(success, trace_id="z", reward=5.0)
    assert right_sibling(failed, 1, [success, better, failed], "success") == better


def test_a_right_action_that_does_not_fit_the_context_is_not_compared(chat: ChatFormat) -> None:
    failed = trace_of(chat, "a", ["no"], [0])
    right = trace_of(chat, "b", ["a right action of many words"], [], success=True)
    choice = SitesConfig(advantage_sites=1)
    whole = hinted_sites([failed, right], chat, lambda _: None, 9, LONG, choice=choice).views
    most = len(whole[1].teacher_ids) - 1
    found = hinted_sites([failed, right], chat, lambda _: None, 9, most, choice=choice).views
    assert [view.compared for view in found] == [False]

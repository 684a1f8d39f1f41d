"""The order of error sites, and the right actions that a hinted teacher is compared at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from composer_mesh.channels.sdpo import hinted_sites
from composer_mesh.configs.sdpo import SitesConfig
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.hint_sources import right_sibling, surprisal
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.tasks.toolbox import ToolboxTask

LONG = 10_000


@pytest.fixture(scope="module")
def chat(tokenizer: Any, toolbox: ToolboxTask) -> ChatFormat:
    return ChatFormat(tokenizer, toolbox.tools)


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

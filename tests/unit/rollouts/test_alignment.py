"""Alignment: the hint moves the teacher's rows, and nothing else differs between the two."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.actors.teacher_outputs.teaching import hinted_states
from composer_mesh.rollouts.alignment import HintedView, MisalignedError, hinted_view
from composer_mesh.rollouts.traces import Trace, Turn

PROMPT = [7, 8]
IDS = st.lists(st.integers(0, 99), max_size=8)


def trace_of(turns: list[tuple[list[int], list[int]]], prompt: list[int] = PROMPT) -> Trace:
    """Contexts without their generation prompt, and actions."""
    made = [
        Turn([*context, *prompt], action, [-1.0] * len(action), [0] * len(action), "stop")
        for context, action in turns
    ]
    return Trace("t", 0, 0, "toolbox", "train", 0, made, [], 0.0, False, [])


TRACES = st.lists(st.tuples(IDS, IDS.filter(bool)), min_size=1, max_size=4).map(trace_of)


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
    trace = trace_of([([1], [2])])
    with pytest.raises(
        MisalignedError, match=r"turn 0 of t ends with .*, not the generation prompt"
    ):
        hinted_view(trace, 0, [5], prompt)


def test_a_turn_without_an_action_has_no_view_and_the_error_names_it() -> None:
    trace = trace_of([([1], [2]), ([3], [])])
    with pytest.raises(MisalignedError, match=r"turn 1 of t has no action token.*leave the turn"):
        hinted_view(trace, 1, [5], PROMPT)


def random_trace(rng: random.Random, turns: int) -> Trace:
    def ids(longest: int) -> list[int]:
        return [rng.randrange(300) for _ in range(rng.randint(1, longest))]

    return trace_of([(ids(12), ids(9)) for _ in range(turns)])


def student_logits(model: Any, trace: Trace) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([trace.token_ids()])).logits[0]


def views_of(traces: list[Trace], hint: list[int]) -> list[tuple[Trace, HintedView]]:
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
    pairs = views_of(traces, [])
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
        hinted_states(model, [view for _, view in views_of([trace], hint)], 4096)
        for hint in ([], [5, 6], [5, 6, 9])
    ]
    assert said[0].shape == said[1].shape == said[2].shape
    assert (said[0] - said[1]).abs().max() > 0.1
    assert (said[1] - said[2]).abs().max() > 0.1


def test_the_teachers_rows_come_in_the_order_of_the_views(
    build_model: Any, rng: random.Random
) -> None:
    model, traces = build_model(1), [random_trace(rng, turns) for turns in (3, 1, 2)]
    views = [view for _, view in views_of(traces, [4, 4, 4])]
    together = hinted_states(model, views, 70)
    alone = torch.cat([hinted_states(model, [view], 70) for view in views])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)

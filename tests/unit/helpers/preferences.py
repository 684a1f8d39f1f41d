"""Students, teachers' replies and preference pairs for tests of channel 3. Nothing is asserted."""

from __future__ import annotations

from typing import Any

from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    PreferencePair,
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
)
from composer_mesh.rollouts.tool_calls import assistant_message, call_text

LOOK = call_text("lookup", {"key": "lamp"})
ADD = call_text("calculator", {"op": "add", "a": 2, "b": 3})
ANSWER = "Answer: 5"
BROKEN = "<tool_call>\n{not json}\n</tool_call>"


def student(text: str) -> StudentState:
    state = FrozenState("g0-s0/1", [{"role": "user", "content": "What is 2 plus 3?"}], 7)
    return StudentState(state, "g0-s0", 1, text, [1, 2, 3], [4, 5], 6)


def answer(teacher: str, text: str, usd: float = 0.5, **more: Any) -> TeacherAnswer:
    said = assistant_message(text, "call_1")
    return TeacherAnswer(teacher, text, said, usd, more.pop("usd_known", True), 0.1, **more)


def failure(teacher: str, kind: FailureKind = FailureKind.RATE, usd: float = 0.0) -> TeacherFailure:
    return TeacherFailure(teacher, kind, "status 429", 0.1, usd)


def answers(*texts: str | None) -> list[TeacherReply]:
    """Teachers a, b, c, …; None is a failure."""
    named = zip("abcdefgh", texts, strict=False)
    return [failure(name) if text is None else answer(name, text) for name, text in named]


def pair_of(
    name: str, chosen: str = ADD, rejected: str = ANSWER, asked: str = "What is 2 plus 3?"
) -> PreferencePair:
    return PreferencePair(
        pair_id=name,
        state_id=name,
        trace_id=f"trace {name}",
        turn=0,
        messages=[{"role": "user", "content": asked}],
        context_ids=[1],
        chosen_text=chosen,
        chosen_message=assistant_message(chosen, "call_0"),
        rejected_text=rejected,
        rejected_message=assistant_message(rejected, "call_0"),
        rejected_ids=[2],
        rejected_version=4,
        teachers=["a", "b"],
        votes=3,
        asked=3,
        usd=0.25,
        usd_known=True,
    )

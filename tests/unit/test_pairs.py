"""Consensus: which answers are one action, and when teachers agree against the student."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    Outcome,
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
    canonical_action,
    decide,
    pair_from_json,
    pair_to_json,
)
from composer_mesh.rollouts.tool_calls import assistant_message, call_text

LOOK = call_text("lookup", {"key": "lamp"})
ADD = call_text("calculator", {"op": "add", "a": 2, "b": 3})
ANSWER = "Answer: 5"
BROKEN = "<tool_call>\n{not json}\n</tool_call>"


def student(text: str) -> StudentState:
    state = FrozenState("g0-s0/1", [{"role": "user", "content": "What is 2 plus 3?"}], 7)
    return StudentState(state, "g0-s0", 1, text, [1, 2, 3], [4, 5], 6)


def answer(teacher: str, text: str, usd: float = 0.5, known: bool = True) -> TeacherAnswer:
    return TeacherAnswer(teacher, text, assistant_message(text, "call_1"), usd, known, 0.1)


def failure(teacher: str) -> TeacherFailure:
    return TeacherFailure(teacher, FailureKind.RATE, "status 429", 0.1)


def answers(*texts: str | None) -> list[TeacherReply]:
    """Teachers a, b, c, …; None is a failure."""
    named = zip("abcdefgh", texts, strict=False)
    return [failure(name) if text is None else answer(name, text) for name, text in named]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ADD, call_text("calculator", {"b": 3.0, "a": 2, "op": "add"})),
        (ADD, ADD.replace(" ", "").replace("\n", "")),
        (ADD, f"Let me add these.\n{ADD}"),
        ("Answer: 5", "The sum of both is five.\nAnswer: 5.0"),
        ("Answer: 1,000", "Answer: 1000"),
        ("I can not  answer.", "i can not answer."),
    ],
)
def test_spelling_does_not_make_another_action(one: str, other: str) -> None:
    assert canonical_action(one).agrees(canonical_action(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ADD, call_text("calculator", {"op": "add", "a": "2", "b": 3})),
        (ADD, call_text("calculator", {"op": "add", "a": True, "b": 3})),
        (call_text("f", {"x": 1}), call_text("f", {"x": True})),
        (ADD, call_text("math", {"op": "add", "a": 2, "b": 3})),
        (ADD, call_text("calculator", {"op": "add", "a": 3, "b": 2})),
        ("Answer: 5", "Answer: 6"),
        (ADD, "Answer: 5"),
        (BROKEN, BROKEN),
        ("", ""),
        (" \n", ""),
        (call_text("f", {"x": {}}), call_text("f", {"x": []})),
    ],
)
def test_another_meaning_is_another_action(one: str, other: str) -> None:
    assert not canonical_action(one).agrees(canonical_action(other))


@pytest.mark.parametrize(("depth", "kind"), [(50, "call"), (900, None), (100_000, "malformed")])
def test_no_depth_of_arguments_breaks_the_comparison(depth: int, kind: str | None) -> None:
    deep = "[" * depth + "]" * depth
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {deep}}}}}\n</tool_call>'
    assert kind in (None, canonical_action(text).kind)


@pytest.mark.parametrize(
    ("own", "texts", "outcome"),
    [
        (ANSWER, (ADD, ADD, ADD), Outcome.PAIR),
        (ANSWER, (ADD, ADD, ANSWER), Outcome.PAIR),
        (ANSWER, (ADD, LOOK, ADD), Outcome.PAIR),
        (ANSWER, (ADD, ADD), Outcome.PAIR),
        (BROKEN, (ADD, ADD, LOOK), Outcome.PAIR),
        ("", (ADD, ADD), Outcome.PAIR),
        (ADD, (ADD, ADD, LOOK), Outcome.STUDENT_AGREES),
        (ADD, (ADD, ADD, ADD), Outcome.STUDENT_AGREES),
        (ANSWER, (ADD, LOOK, ANSWER), Outcome.NO_MAJORITY),
        (ANSWER, (ADD, ADD, LOOK, "Answer: 9"), Outcome.NO_MAJORITY),
        (ANSWER, (ADD, ADD, LOOK, LOOK), Outcome.TIE),
        (ADD, (ADD, ADD, LOOK, LOOK), Outcome.TIE),
        (ANSWER, (ADD, None, None), Outcome.TOO_FEW_VOTES),
        (ANSWER, (ADD, BROKEN, ""), Outcome.TOO_FEW_VOTES),
        (ANSWER, (None, None, None), Outcome.TOO_FEW_VOTES),
        (ANSWER, (BROKEN, BROKEN, BROKEN), Outcome.TOO_FEW_VOTES),
        (ANSWER, (), Outcome.TOO_FEW_VOTES),
        (ANSWER, (ADD, None, ADD), Outcome.PAIR),
        (ANSWER, (ADD, BROKEN, ADD), Outcome.PAIR),
        (ANSWER, (ADD, None, LOOK), Outcome.NO_MAJORITY),
    ],
)
def test_outcome_of_a_vote(own: str, texts: tuple[str | None, ...], outcome: Outcome) -> None:
    decision = decide(student(own), answers(*texts), threshold=2)
    assert decision.outcome is outcome
    assert (decision.pair is not None) == (outcome is Outcome.PAIR)


def test_the_threshold_is_the_least_number_of_agreeing_teachers() -> None:
    votes = answers(ADD, ADD, ADD, LOOK, LOOK)
    assert decide(student(ANSWER), votes, threshold=3).outcome is Outcome.PAIR
    assert decide(student(ANSWER), votes, threshold=4).outcome is Outcome.NO_MAJORITY
    with pytest.raises(ValueError, match="threshold is 1, below 2"):
        decide(student(ANSWER), votes, threshold=1)


def test_a_teacher_that_answers_twice_has_one_vote() -> None:
    twice: list[TeacherReply] = [answer("a", ADD), answer("a", ADD), answer("b", LOOK)]
    assert decide(student(ANSWER), twice, threshold=2).outcome is Outcome.NO_MAJORITY


def test_a_pair_says_where_it_comes_from() -> None:
    replies: list[TeacherReply] = [
        answer("c", f"So:\n{ADD}"),
        answer("b", ADD),
        answer("d", LOOK, usd=0.0, known=False),
        failure("a"),
    ]
    pair = decide(student(ANSWER), replies, threshold=2).pair
    assert pair is not None
    assert (pair.pair_id, pair.trace_id, pair.turn) == ("g0-s0/1", "g0-s0", 1)
    assert (pair.teachers, pair.votes, pair.asked) == (["b", "c"], 3, 4)
    assert (pair.chosen_text, pair.rejected_text) == (ADD, ANSWER)
    assert pair.chosen_message["tool_calls"][0]["function"]["name"] == "calculator"
    assert pair.rejected_message == {"role": "assistant", "content": ANSWER}
    assert (pair.context_ids, pair.rejected_ids, pair.rejected_version) == ([1, 2, 3], [4, 5], 6)
    assert (pair.usd, pair.usd_known) == (1.0, False)


SPELLINGS = [ADD, call_text("calculator", {"b": 3.0, "a": 2.0, "op": "add"}), ANSWER, "Answer: 5.0"]
TEXTS = st.sampled_from([*SPELLINGS, LOOK, "Answer: 6", BROKEN, "", "so", "é\u2028"])
VOTES = st.lists(st.none() | TEXTS, max_size=7)


@given(own=TEXTS, texts=VOTES, threshold=st.integers(2, 4))
def test_a_pair_never_prefers_the_students_own_action(
    own: str, texts: list[str | None], threshold: int
) -> None:
    pair = decide(student(own), answers(*texts), threshold).pair
    if pair is not None:
        chosen = canonical_action(pair.chosen_text)
        assert chosen.kind != "malformed"
        assert not chosen.agrees(canonical_action(own))
        assert len(set(pair.teachers)) >= threshold
        assert 2 * len(pair.teachers) > pair.votes


@given(own=TEXTS, texts=VOTES, random=st.randoms())
def test_the_order_of_replies_does_not_matter(own: str, texts: list[str | None], random) -> None:
    replies = answers(*texts)
    shuffled = random.sample(replies, len(replies))
    assert decide(student(own), shuffled, 2) == decide(student(own), replies, 2)


@given(own=TEXTS, texts=VOTES)
def test_a_failed_teacher_and_a_malformed_answer_are_the_same_to_a_vote(
    own: str, texts: list[str | None]
) -> None:
    failed = [None if text in (BROKEN, "") else text for text in texts]
    one, other = (decide(student(own), answers(*some), 2) for some in (texts, failed))
    assert one.outcome is other.outcome


@given(own=TEXTS, texts=st.lists(TEXTS, min_size=2, max_size=5))
def test_a_pair_survives_json(own: str, texts: list[str]) -> None:
    for some in itertools.accumulate([text] for text in texts):
        pair = decide(student(own), answers(*some), 2).pair
        if pair is not None:
            line = pair_to_json(pair)
            assert b"\n" not in line
            assert pair_from_json(line) == pair

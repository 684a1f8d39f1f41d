"""Consensus: when teachers' answers make a pair, which one is chosen, and what is kept of it.

Equivalence: which spellings are one action, and which differences make another one.
"""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preferences import ADD, ANSWER, BROKEN, LOOK, answer, answers, failure, student

from composer_mesh.rollouts.consensus import (
    LONGEST_ACTION,
    MAJORITY,
    VoteOutcome,
    canonical_action,
    decide,
)
from composer_mesh.rollouts.pairs import (
    FailureKind,
    TeacherAnswer,
    TeacherReply,
    TeacherVote,
)
from composer_mesh.rollouts.tool_calls import call_text


@pytest.mark.parametrize(
    ("own", "texts", "outcome"),
    [
        (ANSWER, (ADD, ADD, ADD), VoteOutcome.PAIR),
        (ANSWER, (ADD, ADD, ANSWER), VoteOutcome.PAIR),
        (ANSWER, (ADD, LOOK, ADD), VoteOutcome.PAIR),
        (ANSWER, (ADD, ADD), VoteOutcome.PAIR),
        (BROKEN, (ADD, ADD, LOOK), VoteOutcome.PAIR),
        ("", (ADD, ADD), VoteOutcome.PAIR),
        (ADD, (ADD, ADD, LOOK), VoteOutcome.STUDENT_AGREES),
        (ADD, (ADD, ADD, ADD), VoteOutcome.STUDENT_AGREES),
        (ANSWER, (ADD, LOOK, ANSWER), VoteOutcome.NO_MAJORITY),
        (ANSWER, (ADD, ADD, LOOK, "Answer: 9"), VoteOutcome.NO_MAJORITY),
        (ADD, (ADD, ADD, LOOK, "Answer: 9"), VoteOutcome.NO_MAJORITY),
        (ANSWER, (ADD, ADD, LOOK, LOOK), VoteOutcome.TIE),
        (ADD, (ADD, ADD, LOOK, LOOK), VoteOutcome.TIE),
        (ANSWER, (ADD, None, None), VoteOutcome.TOO_FEW_VOTES),
        (ANSWER, (ADD, BROKEN, ""), VoteOutcome.TOO_FEW_VOTES),
        (ANSWER, (None, None, None), VoteOutcome.TOO_FEW_VOTES),
        (ANSWER, (BROKEN, BROKEN, BROKEN), VoteOutcome.TOO_FEW_VOTES),
        (ANSWER, (), VoteOutcome.TOO_FEW_VOTES),
        (ANSWER, (ADD, None, ADD), VoteOutcome.PAIR),
        (ANSWER, (ADD, BROKEN, ADD), VoteOutcome.PAIR),
        (ANSWER, (ADD, None, LOOK), VoteOutcome.NO_MAJORITY),
    ],
)
def test_outcome_of_a_vote(own: str, texts: tuple[str | None, ...], outcome: VoteOutcome) -> None:
    decision = decide(student(own), answers(*texts), threshold=2)
    assert decision.outcome is outcome
    assert (decision.pair is not None) == (outcome is VoteOutcome.PAIR)
    assert (decision.agreeing != []) == (outcome in MAJORITY)


def test_the_threshold_is_the_least_number_of_agreeing_teachers() -> None:
    votes = answers(ADD, ADD, ADD, LOOK, LOOK)
    assert decide(student(ANSWER), votes, threshold=3).outcome is VoteOutcome.PAIR
    assert decide(student(ANSWER), votes, threshold=4).outcome is VoteOutcome.NO_MAJORITY
    with pytest.raises(ValueError, match="threshold is 1, below 2"):
        decide(student(ANSWER), votes, threshold=1)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ([ADD], VoteOutcome.PAIR),
        ([ADD, ADD], VoteOutcome.PAIR),
        ([ADD, BROKEN], VoteOutcome.PAIR),
        ([ADD, LOOK], VoteOutcome.TOO_FEW_VOTES),
        ([BROKEN, BROKEN], VoteOutcome.TOO_FEW_VOTES),
    ],
)
def test_a_teacher_has_one_vote_and_none_where_it_contradicts_itself(
    said: list[str], outcome: VoteOutcome
) -> None:
    replies: list[TeacherReply] = [*(answer("a", text) for text in said), failure("a")]
    replies.append(answer("b", ADD))
    decision = decide(student(ANSWER), replies, threshold=2)
    assert decision.outcome is outcome
    assert len(decision.provenance.voices) == 2


def test_a_teacher_that_was_cut_or_did_not_end_its_thought_abstains() -> None:
    cut = [answer("a", ADD), answer("b", ADD, cut=True)]
    thinking = [answer("a", "4"), answer("b", "<think>4"), answer("c", f"<think>{ADD}")]
    for replies in (cut, thinking):
        decision = decide(student(LOOK), replies, 2)
        assert decision.outcome is VoteOutcome.TOO_FEW_VOTES
        kinds = [voice.kind for voice in decision.provenance.voices]
        assert kinds[1:] == ["malformed"] * (len(replies) - 1)
    ended = [answer("a", "4"), answer("b", "<think>2 and 2</think>4")]
    assert decide(student(LOOK), ended, 2).outcome is VoteOutcome.PAIR


def test_the_spelling_that_most_of_the_majority_wrote_is_chosen() -> None:
    spelled = call_text("calculator", {"b": 3, "a": 2, "op": "add"})
    pair = decide(student(ANSWER), answers(spelled, ADD, ADD, LOOK), threshold=2).pair
    assert pair is not None
    assert (pair.chosen_text, pair.teachers) == (ADD, ["a", "b", "c"])
    first = decide(student(ANSWER), answers(spelled, ADD), threshold=2).pair
    assert first is not None
    assert first.chosen_text == spelled


def test_a_pair_says_where_it_comes_from() -> None:
    replies: list[TeacherReply] = [
        answer("c", f"So:\n{ADD}", model="lab/c-2", request_id="r-9"),
        answer("b", ADD, usd=0.0, cached=True),
        answer("d", LOOK, usd=0.0, usd_known=False),
        answer("e", ANSWER),
        answer("f", BROKEN),
        failure("a", FailureKind.TIMEOUT, usd=0.25),
    ]
    replies.append(answer("e", ANSWER, usd=0.125))
    pair = decide(student(ANSWER), replies, threshold=2).pair
    assert pair is None  # 2 of 4 votes are no majority
    del replies[2]
    pair = decide(student(ANSWER), replies, threshold=2).pair
    assert pair is not None
    assert (pair.pair_id, pair.trace_id, pair.turn) == ("g0-s0/1", "g0-s0", 1)
    assert (pair.teachers, pair.votes, pair.asked) == (["b", "c"], 3, 5)
    assert (pair.chosen_text, pair.rejected_text) == (ADD, ANSWER)
    assert pair.chosen_message["tool_calls"][0]["function"]["name"] == "calculator"
    assert pair.rejected_message == {"role": "assistant", "content": ANSWER}
    assert (pair.context_ids, pair.rejected_ids, pair.rejected_version) == ([1, 2, 3], [4, 5], 6)
    assert (pair.usd, pair.usd_known) == (0.5 + 0.5 + 0.5 + 0.25 + 0.125, True)
    add, own = canonical_action(ADD).value, canonical_action(ANSWER).value
    assert pair.provenance.threshold == 2
    assert list(pair.provenance.voices) == [
        TeacherVote("a", "failed", failure=FailureKind.TIMEOUT, usd=0.25),
        TeacherVote("b", "call", add, with_majority=True, cached=True),
        TeacherVote("c", "call", add, True, usd=0.5, model="lab/c-2", request_id="r-9"),
        TeacherVote("e", "number", own, with_student=True, usd=0.625),
        TeacherVote("f", "malformed", usd=0.5),
    ]


def test_a_cost_that_nobody_knows_makes_the_pairs_cost_unknown() -> None:
    replies = [answer("a", ADD), answer("b", ADD), answer("c", BROKEN, usd=0, usd_known=False)]
    pair = decide(student(ANSWER), replies, threshold=2).pair
    assert pair is not None
    assert (pair.usd, pair.usd_known) == (1.0, False)


def test_a_decision_without_a_pair_has_voices_too() -> None:
    agreed = decide(student(ADD), answers(ADD, ADD, LOOK), threshold=2)
    assert [voice.with_majority for voice in agreed.provenance.voices] == [True, True, False]
    assert [voice.with_student for voice in agreed.provenance.voices] == [True, True, False]
    tied = decide(student(ADD), answers(ADD, ADD, LOOK, LOOK), threshold=2)
    assert not any(voice.with_majority for voice in tied.provenance.voices)


def test_long_actions_are_cut_in_the_provenance_and_nowhere_else() -> None:
    long = call_text("f", {"x": "y" * 10_000})
    pair = decide(student(ANSWER), answers(long, long), threshold=2).pair
    assert pair is not None
    assert pair.chosen_text == long
    assert all(len(voice.action) == LONGEST_ACTION + 1 for voice in pair.provenance.voices)


SPELLINGS = [ADD, call_text("calculator", {"b": 3.0, "a": 2.0, "op": "add"}), ANSWER, "Answer: 5.0"]
TEXTS = st.sampled_from([*SPELLINGS, LOOK, "Answer: 6", BROKEN, "", "so", "é\u2028"])
VOTES = st.lists(st.none() | TEXTS, max_size=7)
ABSTENTIONS = st.sampled_from([None, BROKEN, ""])
REPLIES = st.lists(
    st.builds(answer, st.sampled_from("abcde"), TEXTS, st.floats(0, 1), request_id=st.text("01"))
    | st.builds(failure, st.sampled_from("abcde"), st.sampled_from(FailureKind), st.floats(0, 1)),
    max_size=9,
)


@given(own=TEXTS, replies=REPLIES, threshold=st.integers(2, 4), seed=st.randoms())
def test_the_order_of_replies_never_matters(
    own: str, replies: list[TeacherReply], threshold: int, seed: random.Random
) -> None:
    shuffled = seed.sample(replies, len(replies))
    assert decide(student(own), shuffled, threshold) == decide(student(own), replies, threshold)


@given(own=TEXTS, replies=REPLIES, threshold=st.integers(2, 4))
def test_a_pair_has_a_strict_majority_against_the_student(
    own: str, replies: list[TeacherReply], threshold: int
) -> None:
    pair = decide(student(own), replies, threshold).pair
    if pair is not None:
        chosen = canonical_action(pair.chosen_text)
        assert chosen.kind != "malformed"
        assert not chosen.agrees(canonical_action(own))
        assert len(set(pair.teachers)) >= threshold
        assert 2 * len(pair.teachers) > pair.votes
        assert pair.votes <= pair.asked == len({reply.teacher for reply in replies})
        said = [r.action_text for r in replies if isinstance(r, TeacherAnswer)]
        assert pair.chosen_text in said


@given(texts=VOTES, threshold=st.integers(2, 4), rejected=TEXTS)
def test_where_the_student_is_in_the_majority_there_is_no_pair(
    texts: list[str | None], threshold: int, rejected: str
) -> None:
    pair = decide(student(rejected), answers(*texts), threshold).pair
    if pair is not None:
        agreeing = decide(student(pair.chosen_text), answers(*texts), threshold)
        assert agreeing.outcome is VoteOutcome.STUDENT_AGREES
        assert agreeing.pair is None


@given(own=TEXTS, texts=VOTES, added=st.lists(ABSTENTIONS, max_size=3))
def test_an_abstention_changes_no_outcome(
    own: str, texts: list[str | None], added: list[str | None]
) -> None:
    before = decide(student(own), answers(*texts), 2)
    more: list[TeacherReply] = [
        failure(f"z{i}") if text is None else answer(f"z{i}", text) for i, text in enumerate(added)
    ]
    after = decide(student(own), [*answers(*texts), *more], 2)
    assert (after.outcome, after.agreeing) == (before.outcome, before.agreeing)


@given(own=TEXTS, texts=VOTES, name=st.sampled_from("abcdefg"))
def test_one_more_vote_for_the_majority_keeps_it(
    own: str, texts: list[str | None], name: str
) -> None:
    before = decide(student(own), answers(*texts), 2)
    if before.pair is not None:
        louder = [*answers(*texts), answer("zz", before.pair.chosen_text)]
        assert decide(student(own), louder, 2).outcome is VoteOutcome.PAIR


def raw(arguments: str, name: str = "f") -> str:
    """A call whose arguments are spelled by hand."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ADD, call_text("calculator", {"b": 3.0, "a": 2, "op": "add"})),
        (ADD, ADD.replace(" ", "").replace("\n", "")),
        (ADD, f"Let me add these.\n{ADD}"),
        (raw('{"x": 2}'), raw('{"x": 2.0}')),
        (raw('{"x": 1}'), raw('{"x": 1e0}')),
        (raw('{"x": 1000}'), raw('{"x": 1E3}')),
        (raw('{"x": 0}'), raw('{"x": -0.0}')),
        (raw('{"x": 0.1}'), raw('{"x": 0.10}')),
        (raw('{"x": 100000000000000000000}'), raw('{"x": 1e20}')),
        (raw('{"x": "\\u00e9"}'), raw('{"x": "é"}')),
        (raw('{"x": "e\\u0301"}'), raw('{"x": "é"}')),
        (raw('{"e\\u0301": 1}'), raw('{"é": 1}')),
        (raw('{"x": {"b": [1.0, null], "a": true}}'), raw('{"x":{"a":true,"b":[1,null]}}')),
        (raw('{"x": "<tool_call>"}'), raw('{"x": "\\u003ctool_call>"}')),
        (ADD, f"<think>{LOOK} or <tool_call>?</think>\n{ADD}"),
        ("Answer: 5", "The sum of both is five.\nAnswer: 5.0"),
        ("Answer: 1,000", "Answer: 1000"),
        ("I can not  answer.", "i can not answer."),
        ("Straße", "STRASSE"),
        ("cafe\u0301", "CAFÉ"),
        ("<think>\nHm, is it Paris?\n</think>\n\nParis", "Paris"),
    ],
)
def test_spelling_does_not_make_another_action(one: str, other: str) -> None:
    assert canonical_action(one).agrees(canonical_action(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (raw('{"x": 2}'), raw('{"x": "2"}')),
        (raw('{"x": 1}'), raw('{"x": true}')),
        (raw('{"x": 1.0}'), raw('{"x": true}')),
        (raw('{"x": 0}'), raw('{"x": false}')),
        (raw('{"x": null}'), raw("{}")),
        (raw('{"x": null}'), raw('{"x": false}')),
        (raw('{"x": 9007199254740993}'), raw('{"x": 9007199254740992}')),
        (raw('{"x": [1, 2]}'), raw('{"x": [2, 1]}')),
        (raw('{"x": {}}'), raw('{"x": []}')),
        (raw('{"x": "Lamp"}'), raw('{"x": "lamp"}')),
        (raw('{"x": "a b"}'), raw('{"x": "a  b"}')),
        (raw('{"x": "2²"}'), raw('{"x": "22"}')),
        (raw('{"x": 1}', "f"), raw('{"x": 1}', "F")),
        (ADD, call_text("math", {"op": "add", "a": 2, "b": 3})),
        (ADD, call_text("calculator", {"op": "add", "a": 3, "b": 2})),
        ("Answer: 5", "Answer: 6"),
        ("Answer: 5", "5"),
        ("Answer: 5", "Answer: 5."),
        (ADD, "Answer: 5"),
    ],
)
def test_another_meaning_is_another_action(one: str, other: str) -> None:
    assert not canonical_action(one).agrees(canonical_action(other))


@pytest.mark.parametrize(
    "text",
    [
        BROKEN,
        "",
        " \n",
        "<think>\nI wonder.\n</think>\n",
        raw('{"x": 1, "x": 2}'),
        f"{ADD} Done.",
        f"<think>{ADD}",
        raw('{"x": NaN}'),
        raw('{"x": [-Infinity]}'),
        raw('{"x": 1e999}'),
        raw('{"e\\u0301": 1, "é": 2}'),
        raw("[1]"),
        f"{ADD}\n{LOOK}",
        f"{ADD}\n{ADD}",
    ],
)
def test_what_has_no_meaning_agrees_with_nothing_not_even_itself(text: str) -> None:
    key = canonical_action(text)
    assert key.kind == "malformed"
    assert not key.agrees(key)


@pytest.mark.parametrize(("depth", "kind"), [(50, "call"), (900, None), (100_000, "malformed")])
def test_no_depth_of_arguments_breaks_the_comparison(depth: int, kind: str | None) -> None:
    deep = "[" * depth + "]" * depth
    assert kind in (None, canonical_action(raw(f'{{"x": {deep}}}')).kind)


NUMBERS = st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False)
ANY_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3)


@given(arguments=ARGUMENTS, indent=st.sampled_from([None, 0, 3]), ascii_only=st.booleans())
def test_no_way_to_write_json_changes_a_call(
    arguments: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    turned = dict(reversed(arguments.items()))
    other = canonical_action(raw(json.dumps(turned, indent=indent, ensure_ascii=ascii_only)))
    one = canonical_action(call_text("f", arguments))
    assert one == other


@given(number=NUMBERS)
def test_numbers_are_one_where_python_says_so(number: float) -> None:
    others = [number + 1, number / 2, -number, int(number), float(int(number))]
    for other in others:
        one, two = (canonical_action(call_text("f", {"x": value})) for value in (number, other))
        assert (one == two) == (number == other)


@given(text=st.text(max_size=40))
def test_words_are_one_in_each_of_unicodes_canonical_forms(text: str) -> None:
    composed, apart = (unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
    assert canonical_action(composed).kind == canonical_action(apart).kind
    if canonical_action(composed).kind == "words":
        assert canonical_action(composed) == canonical_action(apart)


@given(one=st.text(max_size=20) | st.just(ANSWER), other=st.text(max_size=20))
def test_a_class_has_one_name(one: str, other: str) -> None:
    first, second = canonical_action(one), canonical_action(other)
    assert (first.name == second.name) == (first == second)

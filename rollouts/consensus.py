"""Voting rules that decide when teachers' answers to a state make a preference pair.

1. Each queried teacher has one vote: the class of its action (`actions`). It abstains if it failed,
   if its answer is malformed or was cut at the limit of tokens, or if it gave two different
   answers; the same answer twice is one vote. The student has no vote.
2. Fewer votes than `threshold`: TOO_FEW_VOTES.
3. The action with the most votes needs at least `threshold` of them: else NO_MAJORITY.
4. Two actions share the lead: TIE, even if one of them is the student's.
5. The leading action needs more than half of the votes cast: else NO_MAJORITY.
6. The majority's action equals the student's: STUDENT_AGREES. Otherwise: PAIR, and the majority's
   answer is preferred to the student's. A malformed student action equals no vote.

Partial failures therefore only remove votes: two of three teachers that agree make a pair if the
third one failed, and a single answer makes none. The order of the replies does not matter. The
chosen answer is the majority's most frequent wording; ties are broken by teacher name.

Equivalence classes of actions, used to count teacher votes.

The rules, which users may rely on:

- **Tool calls** are compared by tool name and by arguments as JSON values. Key order, white space,
  escapes and surrounding text are ignored. Numbers are equal by value: `2`, `2.0` and `2e0` are the
  same, and integers are exact at any size. Types are distinct: `2`, `"2"` and `true` differ, and a
  missing argument is not `null`. Strings are compared in Unicode NFC; case and white space are
  significant, because a path, a key or a program may depend on them. List order is significant.
- An **answer with a number** (`Answer: 5`) is compared by the number that the environment parses.
- Any other **words** are compared after casefolding and collapsing white space; a leading
  `<think>…</think>` block is ignored.
- **Malformed** actions are equal to nothing, not even to themselves: a call that is not valid JSON
  or not the only call, that has text behind it, `NaN`, an infinity or a key twice (also in another
  normal form), or that stands in thinking which is not closed; an empty
  answer; a thought that is not closed.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from composer_mesh.rollouts.pairs import (
    PreferencePair,
    Provenance,
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
    TeacherVote,
    VoteKind,
)
from composer_mesh.rollouts.tool_calls import (
    THINKING,
    THINKING_ENDS,
    ToolCall,
    assistant_message,
    normal_form,
    parse_action,
)

_ANSWER = re.compile(r"Answer:\s*(-?[\d,]*\.?\d+)\s*$")


def read_answer(text: str) -> float | None:
    """Return the number after a final `Answer:`, or None if there is none."""
    match = _ANSWER.search(text.strip()[-80:])
    return float(match[1].replace(",", "")) if match else None


@dataclass(frozen=True, slots=True)
class ActionKey:
    """Equivalence class of an action; a malformed action equals nothing, not even itself."""

    kind: Literal["call", "number", "words", "malformed"]
    value: str

    @property
    def name(self) -> str:
        """Return the class as a string that is unique to the class."""
        return f"{self.kind}: {self.value}"

    def agrees(self, other: "ActionKey") -> bool:
        return self.kind != "malformed" and self == other


def canonical_action(text: str) -> ActionKey:
    """Return the equivalence class of an action's text."""
    if text.lstrip().startswith(THINKING) and THINKING_ENDS not in text:
        return ActionKey("malformed", text)
    action = parse_action(text)
    if isinstance(action, ToolCall):
        return _call_key(text, action)
    if action is not None:
        return ActionKey("malformed", text)
    number = read_answer(text)
    if number is not None:
        return ActionKey("number", _canonical_json(number))
    words = _words(text.rpartition(THINKING_ENDS)[2])
    return ActionKey("words", words) if words else ActionKey("malformed", text)


def _call_key(text: str, call: ToolCall) -> ActionKey:
    try:
        return ActionKey("call", f"{_text(call.name)} {_canonical_json(call.arguments)}")
    except (ValueError, RecursionError):
        return ActionKey("malformed", text)


def _canonical_json(value: Any) -> str:
    """Serialize a value canonically; raise ValueError if it has no JSON representation."""
    normal = _normal(value)
    return json.dumps(normal, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        normal = {_text(key): _normal(inner) for key, inner in value.items()}
        if len(normal) < len(value):
            raise ValueError(f"{len(value)} keys are {len(normal)} texts: name each key once")
        return normal
    if isinstance(value, list):
        return [_normal(inner) for inner in value]
    if isinstance(value, str):
        return _text(value)
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number: send one that a float can hold")
    return int(value) if value.is_integer() else value


def _text(value: str) -> str:
    return normal_form("NFC", value)


def _words(text: str) -> str:
    return _text(_text(" ".join(text.split())).casefold())


LONGEST_ACTION = 400


class VoteOutcome(StrEnum):
    """Result of the vote on one state; only `PAIR` makes a pair."""

    PAIR = "pair"
    STUDENT_AGREES = "student_agrees"
    TIE = "tie"
    NO_MAJORITY = "no_majority"
    TOO_FEW_VOTES = "too_few_votes"


MAJORITY = (VoteOutcome.PAIR, VoteOutcome.STUDENT_AGREES)
"""Outcomes in which a majority of the teachers chose the same action."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome of one state, the teacher votes, and the pair if there is one.

    `agreeing` names the majority's teachers; it is empty without a majority.
    """

    state_id: str
    outcome: VoteOutcome
    agreeing: list[str]
    pair: PreferencePair | None
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class _Ballot:
    """Replies of one teacher; `vote` is None if it abstains.

    `answer` is the reply to quote: the well-formed one, if there is any.
    """

    teacher: str
    replies: list[TeacherReply]
    answer: TeacherAnswer | None
    vote: ActionKey | None
    kind: VoteKind


def decide(student: StudentState, replies: Sequence[TeacherReply], threshold: int) -> Decision:
    """Decide by the rules of this module whether the teachers disagree with the student."""
    if threshold < 2:
        raise ValueError(f"agreement threshold is {threshold}, below 2: one teacher agrees alone")
    ballots = _ballots(replies)
    votes = Counter(ballot.vote for ballot in ballots if ballot.vote is not None)
    own = canonical_action(student.action_text)
    outcome, leading = _outcome(own, votes, threshold)
    majority = leading if outcome in MAJORITY else None
    voices = tuple(_voice(ballot, own, majority) for ballot in ballots)
    camp = [ballot for ballot in ballots if majority is not None and ballot.vote == majority]
    provenance = Provenance(threshold, voices)
    pair = _pair(student, ballots, camp, provenance) if outcome is VoteOutcome.PAIR else None
    names = [ballot.teacher for ballot in camp]
    return Decision(student.state.state_id, outcome, names, pair, provenance)


def _outcome(
    own: ActionKey, votes: Counter[ActionKey], threshold: int
) -> tuple[VoteOutcome, ActionKey | None]:
    cast, ranked = votes.total(), votes.most_common(2)
    if cast < threshold:
        return VoteOutcome.TOO_FEW_VOTES, None
    leading, most = ranked[0]
    if most < threshold:
        return VoteOutcome.NO_MAJORITY, None
    if len(ranked) > 1 and ranked[1][1] == most:
        return VoteOutcome.TIE, None
    if 2 * most <= cast:
        return VoteOutcome.NO_MAJORITY, None
    return (VoteOutcome.STUDENT_AGREES if leading.agrees(own) else VoteOutcome.PAIR), leading


def _ballots(replies: Sequence[TeacherReply]) -> list[_Ballot]:
    """Return one ballot for each queried teacher, sorted by name."""
    said: defaultdict[str, list[TeacherReply]] = defaultdict(list)
    for reply in replies:
        said[reply.teacher].append(reply)
    return [_ballot(teacher, said[teacher]) for teacher in sorted(said)]


def _ballot(teacher: str, replies: list[TeacherReply]) -> _Ballot:
    answers = [reply for reply in replies if isinstance(reply, TeacherAnswer)]
    answers.sort(key=lambda answer: (answer.action_text, answer.request_id))
    found = [(canonical_action(answer.action_text), answer) for answer in answers]
    voting = [(key, answer) for key, answer in found if key.kind != "malformed" and not answer.cut]
    votes = {key for key, _ in voting}
    if len(votes) == 1:
        vote, quoted = voting[0]
        return _Ballot(teacher, replies, quoted, vote, vote.kind)
    kind: VoteKind = "undecided" if votes else "malformed" if answers else "failed"
    return _Ballot(teacher, replies, answers[0] if answers else None, None, kind)


def _voice(ballot: _Ballot, own: ActionKey, majority: ActionKey | None) -> TeacherVote:
    answer, vote = ballot.answer, ballot.vote
    failures = [reply.kind for reply in ballot.replies if isinstance(reply, TeacherFailure)]
    return TeacherVote(
        teacher=ballot.teacher,
        kind=ballot.kind,
        action=_cut(vote.value) if vote is not None else "",
        with_majority=vote is not None and vote == majority,
        with_student=vote is not None and vote.agrees(own),
        failure=min(failures) if answer is None else None,
        usd=math.fsum(reply.usd for reply in ballot.replies),
        cached=answer is not None and answer.cached,
        model=answer.model if answer is not None else "",
        request_id=answer.request_id if answer is not None else "",
    )


def _cut(action: str) -> str:
    return action if len(action) <= LONGEST_ACTION else f"{action[:LONGEST_ACTION]}…"


def _pair(
    student: StudentState,
    ballots: Sequence[_Ballot],
    camp: Sequence[_Ballot],
    provenance: Provenance,
) -> PreferencePair:
    replies = [reply for ballot in ballots for reply in ballot.replies]
    chosen = _chosen([ballot.answer for ballot in camp if ballot.answer is not None])
    return PreferencePair(
        pair_id=student.state.state_id,
        state_id=student.state.state_id,
        trace_id=student.trace_id,
        turn=student.turn,
        messages=student.state.messages,
        context_ids=student.context_ids,
        chosen_text=chosen.action_text,
        chosen_message=chosen.message,
        rejected_text=student.action_text,
        rejected_message=assistant_message(student.action_text, f"call_{student.turn}"),
        rejected_ids=student.action_ids,
        rejected_version=student.oldest_version,
        teachers=[ballot.teacher for ballot in camp],
        votes=sum(ballot.vote is not None for ballot in ballots),
        asked=len(ballots),
        usd=math.fsum(reply.usd for reply in replies),
        usd_known=all(r.usd_known for r in replies if isinstance(r, TeacherAnswer)),
        provenance=provenance,
    )


def _chosen(answers: Sequence[TeacherAnswer]) -> TeacherAnswer:
    said = Counter(answer.action_text for answer in answers)
    return min(answers, key=lambda answer: (-said[answer.action_text], answer.teacher))

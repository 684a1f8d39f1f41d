"""From teachers' answers to preference pairs: what counts as the same action, and who agrees.

A pair is made when a majority of the teachers that answered agrees on an action that is not the
student's. Nothing here asks a teacher, encodes text or knows what a pair is trained with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import TypeAdapter

from composer_mesh.rollouts.session import read_answer
from composer_mesh.rollouts.tool_calls import ToolCall, assistant_message, parse_action
from composer_mesh.rollouts.traces import Message


@dataclass(frozen=True, slots=True)
class FrozenState:
    """What a teacher is shown: a conversation up to where an assistant acts."""

    state_id: str
    messages: list[Message]
    seed: int


@dataclass(frozen=True, slots=True)
class StudentState:
    """A frozen state with what the student did there.

    `context_ids` are all ids the student had read, `action_ids` the ones it sampled, stop token
    included where it came; `action_text` is the same action as text.
    """

    state: FrozenState
    trace_id: str
    turn: int
    action_text: str
    context_ids: list[int]
    action_ids: list[int]
    oldest_version: int


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """One teacher's action.

    `usd` is what it cost this time: 0.0 where it came from the cache, and where neither the
    provider nor the prices say (`usd_known`). `model` and `request_id` are the provider's own words
    about who answered what; they are untrusted text.
    """

    teacher: str
    action_text: str
    message: Message
    usd: float
    usd_known: bool
    latency_s: float
    cached: bool = False
    model: str = ""
    request_id: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class FailureKind(StrEnum):
    """Why a teacher did not answer."""

    AUTH = "auth"
    PAYMENT = "payment"
    RATE = "rate"
    MODERATION = "moderation"
    SERVER = "server"
    REQUEST = "request"
    MALFORMED = "malformed"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class TeacherFailure:
    """A teacher that was asked and did not answer; it does not vote."""

    teacher: str
    kind: FailureKind
    text: str
    latency_s: float
    usd: float = 0.0


TeacherReply = TeacherAnswer | TeacherFailure


@dataclass(frozen=True, slots=True)
class ActionKey:
    """The equivalence class of an action. A malformed one agrees with nothing, not even itself."""

    kind: Literal["call", "answer", "malformed"]
    value: str

    def agrees(self, other: "ActionKey") -> bool:
        return self.kind != "malformed" and self == other


class Outcome(StrEnum):
    """What the teachers' replies to one state came to; only `PAIR` makes a pair."""

    PAIR = "pair"
    STUDENT_AGREES = "student_agrees"
    TIE = "tie"
    NO_MAJORITY = "no_majority"
    TOO_FEW_VOTES = "too_few_votes"


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A teachers' action preferred to the student's own, with where it comes from.

    `chosen_text` is encoded by the chat format later; `rejected_ids` are the ids that the student
    sampled. `votes` counts well-formed answers, `asked` every teacher that was asked.
    `reference` holds the frozen initial policy's summed log-probs (nats) of the chosen and of the
    rejected answer, once they were computed.
    """

    pair_id: str
    state_id: str
    trace_id: str
    turn: int
    messages: list[Message]
    context_ids: list[int]
    chosen_text: str
    chosen_message: Message
    rejected_text: str
    rejected_message: Message
    rejected_ids: list[int]
    rejected_version: int
    teachers: list[str]
    votes: int
    asked: int
    usd: float
    usd_known: bool
    reference: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one state, and its pair when there is one."""

    state_id: str
    outcome: Outcome
    agreeing: list[str]
    pair: PreferencePair | None


def canonical_action(text: str) -> ActionKey:
    """The class of an action's text.

    Calls are equal by tool and arguments as JSON values (key order, spacing and 2 against 2.0 do
    not matter; "2" is another type and does). Answers are equal by their number after `Answer:`,
    or else by their words. An empty answer is malformed.
    """
    action = parse_action(text)
    if isinstance(action, ToolCall):
        return _call_key(text, action)
    number, words = read_answer(text), " ".join(text.split()).casefold()
    if action is not None or not words:
        return ActionKey("malformed", text)
    return ActionKey("answer", words if number is None else _canonical_json(number))


def _call_key(text: str, call: ToolCall) -> ActionKey:
    try:
        return ActionKey("call", f"{call.name} {_canonical_json(call.arguments)}")
    except RecursionError:
        return ActionKey("malformed", text)


def _canonical_json(value: Any) -> str:
    return json.dumps(_normal(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_normal(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def decide(student: StudentState, replies: Sequence[TeacherReply], threshold: int) -> Decision:
    """Whether the teachers agree against the student.

    Each teacher has one vote, its first well-formed answer; failures and malformed answers
    abstain. The leading action needs `threshold` votes and more than half of those cast. Two
    actions that lead together are a tie, also when one of them is the student's. The student has
    no vote. The order of the replies does not matter, unless one teacher answers twice.
    """
    if threshold < 2:
        raise ValueError(f"agreement threshold is {threshold}, below 2: one teacher agrees alone")
    votes = _votes(replies)
    cast = sum(len(camp) for camp in votes.values())
    ranked = sorted(votes.items(), key=lambda item: (-len(item[1]), item[0].kind, item[0].value))
    outcome = _outcome(canonical_action(student.action_text), ranked, cast, threshold)
    camp = sorted(ranked[0][1], key=lambda answer: answer.teacher) if ranked else []
    pair = _pair(student, replies, camp, cast) if outcome is Outcome.PAIR else None
    return Decision(student.state.state_id, outcome, [a.teacher for a in camp], pair)


def _votes(replies: Sequence[TeacherReply]) -> dict[ActionKey, list[TeacherAnswer]]:
    votes: dict[ActionKey, list[TeacherAnswer]] = {}
    voted: set[str] = set()
    for reply in replies:
        if isinstance(reply, TeacherFailure) or reply.teacher in voted:
            continue
        key = canonical_action(reply.action_text)
        if key.kind != "malformed":
            voted.add(reply.teacher)
            votes.setdefault(key, []).append(reply)
    return votes


def _outcome(
    own: ActionKey,
    ranked: list[tuple[ActionKey, list[TeacherAnswer]]],
    cast: int,
    threshold: int,
) -> Outcome:
    if cast < threshold:
        return Outcome.TOO_FEW_VOTES
    key, most = ranked[0][0], len(ranked[0][1])
    if most < threshold:
        return Outcome.NO_MAJORITY
    if len(ranked) > 1 and len(ranked[1][1]) == most:
        return Outcome.TIE
    if 2 * most <= cast:
        return Outcome.NO_MAJORITY
    return Outcome.STUDENT_AGREES if key.agrees(own) else Outcome.PAIR


def _pair(
    student: StudentState, replies: Sequence[TeacherReply], camp: list[TeacherAnswer], cast: int
) -> PreferencePair:
    answers = [reply for reply in replies if isinstance(reply, TeacherAnswer)]
    return PreferencePair(
        pair_id=student.state.state_id,
        state_id=student.state.state_id,
        trace_id=student.trace_id,
        turn=student.turn,
        messages=student.state.messages,
        context_ids=student.context_ids,
        chosen_text=camp[0].action_text,
        chosen_message=camp[0].message,
        rejected_text=student.action_text,
        rejected_message=assistant_message(student.action_text, f"call_{student.turn}"),
        rejected_ids=student.action_ids,
        rejected_version=student.oldest_version,
        teachers=[answer.teacher for answer in camp],
        votes=cast,
        asked=len({reply.teacher for reply in replies}),
        usd=sum(answer.usd for answer in answers),
        usd_known=all(answer.usd_known for answer in answers),
    )


_ADAPTER = TypeAdapter(PreferencePair)


def pair_to_json(pair: PreferencePair) -> bytes:
    """One line of JSON without a newline."""
    return _ADAPTER.dump_json(pair)


def pair_from_json(line: bytes | str) -> PreferencePair:
    """The pair of one line; raises pydantic's ValidationError where the line is not one."""
    return _ADAPTER.validate_json(line)

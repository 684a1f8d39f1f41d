"""Data types of the replay channel: states, teacher replies and preference pairs.

Export of preference pairs as rows of TRL's conversational preference format.

`prompt`, `chosen` and `rejected` are lists of messages with only a role and a text: a tool call is
written into the text as the student writes it. Every row therefore has the same keys and types, so
loaders that infer a schema from the first rows (`datasets`) read files of any length, and a chat
template does not change the spelling of a call. Everything else is stored as JSON strings: `tools`
(TRL reads them so), the chat messages with their `tool_calls`, and the `provenance`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN, call_text, wire_arguments
from composer_mesh.rollouts.traces import Message


@dataclass(frozen=True, slots=True)
class FrozenState:
    """Input of a teacher: a conversation of a task, up to the assistant turn to answer."""

    state_id: str
    messages: list[Message]
    seed: int
    task: str = ""


@dataclass(frozen=True, slots=True)
class StudentState:
    """A frozen state with the student's own action.

    `context_ids` are all ids that the student had read, `action_ids` the ones it sampled, including
    the stop token if sampled; `action_text` is the same action as text. `situation` is a coarse
    category of the state.
    """

    state: FrozenState
    trace_id: str
    turn: int
    action_text: str
    context_ids: list[int]
    action_ids: list[int]
    oldest_version: int
    situation: str = ""


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """One teacher's action.

    `usd` is the cost of this call: 0.0 if the answer came from the cache, and if neither the
    provider nor the prices state a cost (`usd_known` is then False). `model` and `request_id` are
    reported by the provider and are untrusted text. `cut`: it ended at the limit of tokens.
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
    cut: bool = False


class FailureKind(StrEnum):
    """Reason why a teacher did not answer."""

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
    """Failed query of a teacher; it does not vote. `sent` unless its last attempt was not sent.

    `status` is that of the HTTP response that refused it, None for any other failure.
    """

    teacher: str
    kind: FailureKind
    text: str
    latency_s: float
    usd: float = 0.0
    sent: bool = False
    status: int | None = None

    @property
    def cause(self) -> str:
        """The HTTP status of the refusal, such as "401", else the kind of the failure."""
        return self.kind.value if self.status is None else str(self.status)


TeacherReply = TeacherAnswer | TeacherFailure

VoteKind = Literal["call", "number", "words", "malformed", "undecided", "failed"]


@dataclass(frozen=True, slots=True)
class TeacherVote:
    """The vote of one teacher on a state, compared with the majority and the student.

    `kind` and `action` are the class of its action, truncated if long; "undecided" means that the
    teacher gave two different answers, "failed" that it did not answer, for the reason in
    `failure`. `usd` is the cost of this call over all attempts. `model` and `request_id` are
    reported by the provider: untrusted text.
    """

    teacher: str
    kind: VoteKind
    action: str = ""
    with_majority: bool = False
    with_student: bool = False
    failure: FailureKind | None = None
    usd: float = 0.0
    cached: bool = False
    model: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Votes of all queried teachers, by name, and the agreement threshold."""

    threshold: int = 0
    voices: tuple[TeacherVote, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """The teachers' action preferred to the student's own, with its origin.

    `chosen_text` is encoded by the chat format later; `rejected_ids` are the ids that the student
    sampled, and `rejected_version` is the policy version of the oldest of them. `teachers` agreed
    on the chosen action, `votes` counts the teachers that voted, `asked` all that were queried.
    `provenance` holds the vote of each. `reference` holds the summed log-probs (nats) of the chosen
    and the rejected answer under the frozen initial policy, once computed.
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
    provenance: Provenance = field(default_factory=Provenance)


def teachers_margin(pair: PreferencePair) -> float:
    """Return by how many of the queried teachers the chosen action leads the next one.

    (votes for it - votes for the runner-up) / teachers queried, above 0 and at most 1. Teachers
    that did not answer count in the denominator only.
    """
    others = [
        (voice.kind, voice.action)
        for voice in pair.provenance.voices
        if not voice.with_majority and voice.kind in ("call", "number", "words")
    ]
    runner_up = max(Counter(others).values(), default=0)
    return (len(pair.teachers) - runner_up) / pair.asked


_ADAPTER = fail_fast(PreferencePair)


def pair_to_json(pair: PreferencePair) -> bytes:
    """Serialize a pair to one line of JSON without a newline."""
    return _ADAPTER.dump_json(pair)


def pair_from_json(line: bytes | str) -> PreferencePair:
    """Parse one line; raise pydantic's ValidationError if it is not a pair."""
    return _ADAPTER.validate_json(line)


_PROVENANCE = fail_fast(Provenance)


def pair_record(pair: PreferencePair, tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the row of a pair; the key `tools` is present only if there are tools."""
    row: dict[str, Any] = {
        "prompt": [spoken_message(message) for message in pair.messages],
        "chosen": [{"role": "assistant", "content": pair.chosen_text}],
        "rejected": [{"role": "assistant", "content": pair.rejected_text}],
    }
    if tools:
        row["tools"] = _json(list(tools))
    return row | {
        "state_id": pair.state_id,
        "trace_id": pair.trace_id,
        "turn": pair.turn,
        "chosen_text": pair.chosen_text,
        "rejected_text": pair.rejected_text,
        "state_messages": _json(pair.messages),
        "chosen_message": _json(pair.chosen_message),
        "rejected_message": _json(pair.rejected_message),
        "n_teachers_agreeing": len(pair.teachers),
        "teachers": list(pair.teachers),
        "votes": pair.votes,
        "asked": pair.asked,
        "usd": float(pair.usd),
        "usd_known": pair.usd_known,
        "policy_version": pair.rejected_version,
        "provenance": _PROVENANCE.dump_json(pair.provenance).decode(),
    }


def spoken_message(message: Message) -> dict[str, str]:
    """Convert a chat message to a role and one text that includes its tool calls."""
    calls = message.get("tool_calls") or []
    parts = [_content(message.get("content")), *(_call(call["function"]) for call in calls)]
    return {"role": str(message["role"]), "content": "\n".join(part for part in parts if part)}


def _content(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return "" if content is None else str(content)


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    try:
        return call_text(function["name"], wire_arguments(arguments))
    except (ValueError, RecursionError):
        name = _json(function["name"])
        return f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""The replay channel's data: states, teachers' replies, and the preference pairs they come to.

Nothing here counts votes, asks a teacher, encodes text or knows what a pair is trained with.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import TypeAdapter

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
    included where it came; `action_text` is the same action as text. `situation` names what kind
    of state it is, coarsely.
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

VoiceKind = Literal["call", "number", "words", "malformed", "undecided", "failed"]


@dataclass(frozen=True, slots=True)
class Voice:
    """What one teacher said about a state, and whom it sided with.

    `kind` and `action` are the class of its action, cut where it is long; "undecided" is a teacher
    that answered twice in different ways, "failed" one that did not answer, for the reason in
    `failure`. `usd` is what it cost this time, in all its attempts. `model` and `request_id` are
    the provider's own words: untrusted text.
    """

    teacher: str
    kind: VoiceKind
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
    """Every asked teacher's voice, by name, and how many had to agree."""

    threshold: int = 0
    voices: tuple[Voice, ...] = ()


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A teachers' action preferred to the student's own, with where it comes from.

    `chosen_text` is encoded by the chat format later; `rejected_ids` are the ids that the student
    sampled, and `rejected_version` the policy version of the oldest of them. `teachers` agreed on
    the chosen action, `votes` counts the teachers that voted, `asked` all that were asked. What
    each of them said is in `provenance`, which is empty in pairs of older runs.
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
    provenance: Provenance = field(default_factory=Provenance)


_ADAPTER = TypeAdapter(PreferencePair)


def pair_to_json(pair: PreferencePair) -> bytes:
    """One line of JSON without a newline."""
    return _ADAPTER.dump_json(pair)


def pair_from_json(line: bytes | str) -> PreferencePair:
    """The pair of one line; raises pydantic's ValidationError where the line is not one."""
    return _ADAPTER.validate_json(line)

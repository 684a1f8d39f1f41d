"""Record of a rollout: turns of token ids, error sites and the verified reward.

Token ids are authoritative. The text (`messages`) is stored for people and for teachers, and is
never tokenized again.

Divergence between student and SDPO teacher at each token of a hinted turn.

The experts that a mixture's routers chose for the tokens of a rollout, as the bytes of an array.

The trainer computes with the same ones (router replay), so that it differs from the engine by
rounding alone. 48 layers of 8 experts are 384 bytes a token.

Quick pickles of the messages of rollout workers, of which there are thousands a second: ids and
log-probs travel as the bytes of arrays; versions, nearly always equal, as runs. A frozen dataclass
with slots searches its fields each time that it is pickled, unless it says how.
"""

import math
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, groupby, repeat, starmap
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from composer_mesh.configs.validation import fail_fast

T = TypeVar("T")

IDS, LOGPROBS = "i", "d"
"""Type codes of `array`: int32 for token ids, float64 for log-probs."""


def pickled_by_position(cls: type[T]) -> type[T]:
    """Pickle a dataclass of two or more fields as its class and their values."""
    values = attrgetter(*(one.name for one in fields(cls)))  # type: ignore[arg-type]

    def __reduce__(self: T) -> Any:
        return cls, values(self)

    cls.__reduce__ = __reduce__  # type: ignore[method-assign, assignment]
    return cls


def packed(code: str, values: Sequence[float]) -> bytes:
    """Return numbers as bytes; raises OverflowError for an id of more than 32 bits."""
    return array(code, values).tobytes()


def unpacked(code: str, contents: bytes) -> list[Any]:
    """Return the numbers that were packed."""
    values = array(code)
    values.frombytes(contents)
    return values.tolist()


def runs_of(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return values as pairs of a value and how often it follows itself."""
    if values and values.count(values[0]) == len(values):
        return [(values[0], len(values))]
    return [(value, len(list(run))) for value, run in groupby(values)]


def values_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the values of runs, one after another."""
    return list(chain.from_iterable(starmap(repeat, runs)))


def _decoded(contents: Any) -> Any:
    return b64decode(contents, validate=True) if isinstance(contents, str) else contents


def _encoded(contents: bytes) -> str:
    return b64encode(contents).decode("ascii")


Contents = Annotated[
    bytes, BeforeValidator(_decoded), PlainSerializer(_encoded, return_type=str, when_used="json")
]
"""Bytes, which are base64 in JSON."""


@pickled_by_position
@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Numbers of experts [positions, layers, per_token], each of `width` bytes, 1 or 2.

    `layers` are those with experts, in order; `per_token` is how many experts compute a token.
    """

    layers: int
    per_token: int
    width: int
    contents: Contents

    def __post_init__(self) -> None:
        if min(self.layers, self.per_token) < 1 or self.width not in (1, 2):
            raise ValueError(
                f"choices of {self.layers} layers and {self.per_token} experts a token, of "
                f"{self.width} bytes each: layers and experts are at least 1, bytes 1 or 2"
            )
        if len(self.contents) % self.position_bytes:
            raise ValueError(
                f"choices of {len(self.contents)} bytes are of no whole number of positions, of "
                f"{self.position_bytes} bytes each"
            )

    @property
    def position_bytes(self) -> int:
        """Bytes of one position."""
        return self.layers * self.per_token * self.width

    @property
    def positions(self) -> int:
        """Number of positions that experts were chosen for."""
        return len(self.contents) // self.position_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts of a token, and bytes of a number."""
        return self.layers, self.per_token, self.width


def joined(parts: Sequence[ExpertChoices]) -> ExpertChoices:
    """Return the choices of parts that follow each other; raises ValueError for unlike ones."""
    first = parts[0]
    if unlike := next((one for one in parts if one.shape != first.shape), None):
        raise ValueError(
            f"choices of {first.shape} (layers, experts, bytes) are followed by {unlike.shape}: "
            "those of one rollout are of one model"
        )
    return ExpertChoices(*first.shape, b"".join(one.contents for one in parts))


@dataclass(frozen=True, slots=True)
class TurnDivergences:
    """One hinted turn: a number in nats for each of its sampled tokens, as a float32 array.

    It is the channel's divergence at that token, before the step's update. Where the teacher
    returns log-probs of sampled tokens only, it is the student's log-prob minus the teacher's,
    which may be negative.
    """

    trace_id: str
    turn: int
    values: "array[float]"


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message that was read; raise ValueError if it has not the shape of the protocol."""
    if not isinstance(message.get("role"), str):
        raise ValueError("a message has no role")
    if not isinstance(message.get("content"), str | list | None):
        raise ValueError("the content of a message is neither text nor parts")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise ValueError("the tool_calls of a message are not calls of functions")
    return message


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict)
    )


Message = Annotated[dict[str, Any], AfterValidator(_chat_message)]
"""An OpenAI chat message: role, content, and tool_calls or tool_call_id where they apply."""

Split = Literal["train", "heldout"]
StopReason = Literal["stop", "length"]


@pickled_by_position
@dataclass(frozen=True, slots=True)
class ErrorSite:
    """A turn whose action failed, with the facts that a hint may use.

    `data` holds the error's own fields (a tool's name, the available keys, …) and never
    the verified answer.
    """

    turn: int
    error_kind: str
    hint_template_key: str
    data: dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and the context ids added before it.

    `context_ids` are the ids added since the previous action (turn 0: the complete prompt), so a
    trace is the concatenation of its turns. `action_ids`, `logprobs` (nats, of the distribution
    sampled from) and `versions` (policy version of each token) have equal length. A turn that is
    not `trained` is only context for the policy loss. `experts` are those that an engine of a
    mixture chose for the positions since the last one of the turn before, up to the last but one
    of this turn.
    """

    context_ids: list[int]
    action_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason
    trained: bool = True
    experts: ExpertChoices | None = None

    def __post_init__(self) -> None:
        lengths = (len(self.action_ids), len(self.logprobs), len(self.versions))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"a turn has {lengths[0]} action ids, {lengths[1]} log-probs and {lengths[2]} "
                "versions: each action token needs exactly one of each"
            )

    def __reduce__(self) -> Any:
        ids = packed(IDS, self.context_ids), packed(IDS, self.action_ids)
        logprobs, versions = packed(LOGPROBS, self.logprobs), runs_of(self.versions)
        rest = self.stop_reason, self.trained, self.experts
        return _unpickled_turn, (*ids, logprobs, versions, *rest)


def _unpickled_turn(
    context: bytes,
    action: bytes,
    logprobs: bytes,
    versions: list[tuple[int, int]],
    *rest: Any,
) -> Turn:
    ids = unpacked(IDS, context), unpacked(IDS, action)
    return Turn(*ids, unpacked(LOGPROBS, logprobs), values_of(versions), *rest)


@pickled_by_position
@dataclass(frozen=True, slots=True)
class Trace:
    """A finished episode of one sample.

    `group_id` counts prompt groups in order of admission, `sample` counts within the group.
    `messages` is the complete conversation as the environment saw it. `rewards` are the values of
    the task's reward functions by name, before weights; `answer` is its verified answer, which no
    hint may contain. `others` are further trajectories of the same episode, such as those of
    sub-agents, each with a reward of its own. Rewards of a group are compared among trajectories
    with the same `role`; one that has an `advantage` or `turn_advantages` is compared with none.
    `penalty` is what failed calls took from the reward, `left_out` names rewards that the whole
    group does without.

    `turn_rewards` are the parts of `reward` that were given for single turns, and
    `turn_advantages` replace one `advantage` for all of them: one number for each turn, or none.
    `episode_id` is what a server of the environment calls the episode; empty without one. One that
    is `screened` is stored and measured, and nothing of it is trained in any channel.
    """

    trace_id: str
    group_id: int
    sample: int
    task: str
    split: Split
    index: int
    turns: list[Turn]
    messages: list[Message]
    reward: float
    success: bool
    error_sites: list[ErrorSite]
    rewards: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    others: list["Trace"] = field(default_factory=list)
    role: str = ""
    advantage: float | None = None
    penalty: float = 0.0
    left_out: list[str] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_advantages: list[float] = field(default_factory=list)
    episode_id: str = ""
    screened: bool = False

    def __post_init__(self) -> None:
        for name in ("turn_rewards", "turn_advantages"):
            if (count := len(getattr(self, name))) not in (0, len(self.turns)):
                raise ValueError(
                    f"{self.trace_id} has {count} {name} for {len(self.turns)} turns: give one "
                    "number for each turn, or none"
                )

    @property
    def has_own_advantage(self) -> bool:
        """Whether the trajectory is compared with no other."""
        return self.advantage is not None or bool(self.turn_advantages)

    @property
    def outcome(self) -> float:
        """The part of the reward that was given for the whole trajectory."""
        return self.reward - math.fsum(self.turn_rewards) if self.turn_rewards else self.reward

    def trajectories(self) -> list["Trace"]:
        """Return all trajectories of the episode, each as a trace without others."""
        if not self.others:
            return [self]
        return [replace(self, others=[]), *self.others]

    def token_ids(self) -> list[int]:
        """Return all ids of the episode in order: context, action, context, action, …"""
        return [token for turn in self.turns for token in (*turn.context_ids, *turn.action_ids)]

    def action_places(self) -> list[int]:
        """Return the message indices of the turns' actions; a prompt may hold assistant messages.

        Raises ValueError where there are fewer of them than turns.
        """
        spoken = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(spoken) < len(self.turns):
            raise ValueError(
                f"trace {self.trace_id} has {len(self.turns)} turns and {len(spoken)} assistant "
                "messages: store the conversation with each action in it"
            )
        return spoken[len(spoken) - len(self.turns) :]

    def action_mask(self) -> list[bool]:
        """Return a mask that is True at trained ids; same length as `token_ids()`."""
        mask: list[bool] = []
        for turn in self.turns:
            mask += [False] * len(turn.context_ids) + [turn.trained] * len(turn.action_ids)
        return mask

    def expert_choices(self) -> ExpertChoices | None:
        """Return the experts of all positions but the last, None unless each turn has some.

        Raises ValueError if they are of another number of positions.
        """
        parts = [turn.experts for turn in self.turns if turn.experts is not None]
        if not parts or len(parts) < len(self.turns):
            return None
        found, wanted = joined(parts), len(self.token_ids()) - 1
        if found.positions != wanted:
            raise ValueError(
                f"{self.trace_id} has experts of {found.positions} positions for {wanted + 1} "
                "tokens: each but the last has some"
            )
        return found

    def action_tokens(self) -> int:
        """Return the number of sampled tokens of this trajectory, without those of others."""
        return sum(len(turn.action_ids) for turn in self.turns)

    def versions(self) -> list[int]:
        """Return the policy versions of all sampled tokens, those of other trajectories too."""
        turns = [turn for one in self.trajectories() for turn in one.turns]
        return [version for turn in turns for version in turn.versions]

    def oldest_version(self) -> int:
        """Return the policy version of the oldest sampled token."""
        return min(self.versions())

    def prompt_ids(self, turn: int) -> list[int]:
        """Return all ids that the policy had read when it acted at `turn`."""
        before = [i for past in self.turns[:turn] for i in (*past.context_ids, *past.action_ids)]
        return before + self.turns[turn].context_ids


def equal_rewards(group: Iterable[Trace]) -> bool:
    """Whether no two trajectories that are compared differ in rewards, so that none is trained.

    A trajectory with an advantage of its own is trained unless that is 0.
    """
    every = [one for trace in group for one in trace.trajectories()]
    own = [one for one in every if one.has_own_advantage]
    if any(one.advantage or any(one.turn_advantages) for one in own):
        return False
    compared = [one for one in every if not one.has_own_advantage]
    roles = {one.role for one in compared}
    return len({(one.role, one.reward, *one.turn_rewards) for one in compared}) <= len(roles)


_ADAPTER = fail_fast(Trace)


def trace_to_json(trace: Trace) -> bytes:
    """Serialize a trace to one line of JSON without a newline."""
    return _ADAPTER.dump_json(trace)


def trace_from_json(line: bytes | str) -> Trace:
    """Parse one line; raise pydantic's ValidationError if it is not a trace."""
    return _ADAPTER.validate_json(line)

"""Reward functions: named, weighted, and called once with everything that a finished episode said.

class Sums(Task):
    @reward
    def correct(self, transcript: Transcript) -> float:
        return float(transcript.answer.strip() == transcript.row["answer"])

    @reward(weight=0.1)
    async def brief(self, transcript: Transcript) -> float: ...

    @turn_reward
    def progress(self, transcript: Transcript) -> list[float]: ...
    @group_reward
    def different(self, transcripts: Sequence[Transcript]) -> Sequence[float]: ...

Rewards of an episode's single turns: those of its tools, and those of the task's functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol, overload

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.tasks.errors import UnusableTask, shown
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.tool import Function, marked

MARK = "__composer_mesh_reward__"
TURN_MARK = "__composer_mesh_turn_reward__"
GROUP_MARK = "__composer_mesh_group_reward__"

Ending = Literal["answer", "tool", "turns", "context", "unknown"]
"""What ended an episode: an answer, a tool, the last turn, or a full context."""


@dataclass(frozen=True)
class Transcript:
    """A finished episode as text: what reward functions read.

    `messages` are the whole conversation, `errors` the actions that failed. `session` is the
    episode's own, with whatever its tools left in it; None where a workflow scored messages alone.
    In a group reward there is no session, what ended the episode is unknown, and `rewards` are its
    own ones by name.
    """

    episode: Episode
    messages: list[Message]
    errors: list[ErrorSite] = field(default_factory=list)
    ended: Ending = "answer"
    session: Session | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def row(self) -> Mapping[str, Any]:
        """The row that the episode was made from."""
        return self.episode.payload

    @property
    def answer(self) -> str:
        """Text of the agent's last message; empty if it wrote none."""
        spoken = [one for one in self.messages if one["role"] == "assistant"]
        return str(spoken[-1].get("content") or "") if spoken else ""

    @property
    def turns(self) -> int:
        """Number of the agent's messages."""
        return sum(one["role"] == "assistant" for one in self.messages)


@dataclass(frozen=True)
class RewardOptions:
    """Name and weight of a decorated function; no name stands for the function's own."""

    weight: float = 1.0
    name: str | None = None


class Decorator(Protocol):
    """Marks a method of a task, plain or async; by its own name and with weight 1 unless given."""

    @overload
    def __call__(self, function: Function, /) -> Function: ...

    @overload
    def __call__(
        self, *, weight: float = 1.0, name: str | None = None
    ) -> Callable[[Function], Function]: ...


def _marking(mark: str, doc: str) -> Decorator:
    """Return the decorator that leaves a mark."""

    def decorator(function: Any = None, /, *, weight: float = 1.0, name: str | None = None) -> Any:
        return marked(mark, RewardOptions(weight, name), function)

    decorator.__doc__ = doc
    return decorator


reward = _marking(
    MARK,
    """Make a method of a task one of its rewards; it may be plain or async.

    It takes a `Transcript` and returns a finite number. The episode's reward is the weighted sum of
    all of them, and each is in the metrics by its name.
    """,
)
turn_reward = _marking(
    TURN_MARK,
    """Make a method of a task a reward of single turns; it may be plain or async.

    It takes a `Transcript` and returns a finite number for each of the agent's turns. Times their
    weight they are rewards of these turns, and parts of the episode's reward; their sum is in the
    metrics by its name.
    """,
)
group_reward = _marking(
    GROUP_MARK,
    """Make a method of a task a reward for a whole group; it may be plain or async.

    It takes the transcripts of an episode's samples and returns a finite number for each. It is
    added to their rewards, weighted, and is in the metrics by its name.
    """,
)


@dataclass(frozen=True)
class RewardFunction:
    """One reward of a task: of a whole episode, of its turns, or of a group."""

    name: str
    weight: float
    function: Callable[[Any], Any]


def rewards_of(task: object, mark: str = MARK) -> list[RewardFunction]:
    """Return the methods of a task with a decorator's mark, in order of definition."""
    marked: dict[str, RewardOptions] = {}
    for base in reversed(type(task).__mro__):
        for attribute, value in vars(base).items():
            if hasattr(value, mark):
                marked[attribute] = getattr(value, mark)
            elif attribute in marked:
                del marked[attribute]  # overridden by a method that is no reward
    return [
        RewardFunction(options.name or attribute, options.weight, getattr(task, attribute))
        for attribute, options in marked.items()
    ]


def finite_number(value: Any) -> float | None:
    """Return a number, also of numpy and torch with a single value; None if it is not finite."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    try:
        found = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


@dataclass
class TurnRewards:
    """Rewards of the turns of one episode; `given` says whether there are any."""

    values: list[float] = field(default_factory=list)
    given: bool = False

    def end_turn(self, session: Session) -> None:
        """Take what the turn that has just ended was given by `Session.add_reward`."""
        value, session.turn_reward = session.turn_reward, None
        self.given = self.given or value is not None
        self.values.append(0.0 if value is None else _finite(value, "add_reward was given"))

    def of_turns(self, turns: int) -> TurnRewards:
        """Return a copy; an episode that was never stepped has 0 for each of `turns`."""
        return TurnRewards(list(self.values) or [0.0] * turns, self.given)

    def add(self, function: RewardFunction, returned: Any) -> float:
        """Add what a function of a task returned; return its sum, before its weight."""
        what = f"turn reward {function.name!r}"
        if not isinstance(returned, Sequence) or isinstance(returned, str):
            raise UnusableTask(f"{what} returned {shown(returned)!r}: return a list of numbers")
        if len(returned) != len(self.values):
            raise UnusableTask(
                f"{what} returned {len(returned)} numbers for {len(self.values)} turns: return one "
                "for each of the agent's turns"
            )
        found = [_finite(value, f"{what} returned") for value in returned]
        weighted = zip(self.values, found, strict=True)
        self.values = [value + function.weight * more for value, more in weighted]
        self.given = True
        return math.fsum(found)


def _finite(value: Any, what: str) -> float:
    found = finite_number(value)
    if found is None:
        raise UnusableTask(f"{what} {shown(value)!r}: give finite numbers")
    return found

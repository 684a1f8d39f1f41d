"""The tree of everything that was sampled for one episode's agent.

Each sampled turn follows another one, or begins a segment. Each path to a leaf is a trajectory; a
turn that several of them share is trained in the first one only. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.traces import Message, StopReason, Turn


@dataclass(eq=False, slots=True)
class CapturedTurn:
    """One sampled answer: the turn, what was asked since its parent, and what was returned."""

    parent: "CapturedTurn | None"
    turn: Turn
    asked: list[Message]
    answer: Message
    tools: list[dict[str, Any]]
    finish: StopReason
    """"stop" also where a stop string ended the answer."""
    path: bytes = b""
    """Key of the conversation up to this answer."""
    delivered: bool = False
    """The client got the answer; others are no part of a trajectory."""

    def line(self) -> list["CapturedTurn"]:
        """Return the turns from the beginning of the segment up to this one."""
        found: list[CapturedTurn] = []
        node: CapturedTurn | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def token_ids(self) -> list[int]:
        """Return all ids up to the end of this turn."""
        turns = [node.turn for node in self.line()]
        return [token for turn in turns for token in (*turn.context_ids, *turn.action_ids)]

    def deliver(self) -> None:
        """Mark this turn, and those before it, as received by the client."""
        node: CapturedTurn | None = self
        while node is not None and not node.delivered:
            node.delivered = True
            node = node.parent


def received(turns: Iterable[CapturedTurn]) -> CapturedTurn | None:
    """Return the last one that its client got, of answers that read the same."""
    return next((turn for turn in reversed(list(turns)) if turn.delivered), None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks to continue: new messages and ids after `parent`, and all ids."""

    parent: CapturedTurn | None
    asked: list[Message]
    context_ids: list[int]
    ids: list[int]
    tools: list[dict[str, Any]] = field(default_factory=list)
    path: bytes = b""


@dataclass(frozen=True, slots=True)
class CapturedTrajectory:
    """One path through the tree, with its whole conversation as the agent saw it.

    `trained` says for each turn whether it counts here; a shared turn counts in one trajectory.
    """

    turns: list[Turn]
    trained: list[bool]
    messages: list[Message]
    tools: list[dict[str, Any]]


class TurnTree:
    """All sampled turns of one episode, in the order in which they were recorded."""

    def __init__(self) -> None:
        self._turns: list[CapturedTurn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: CapturedTurn) -> None:
        self._turns.append(turn)

    def withdraw(self, turn: CapturedTurn) -> None:
        """Mark a turn as not received, unless another one follows it."""
        turn.delivered = any(other.parent is turn for other in self._turns)

    def trajectories(self) -> list[CapturedTrajectory]:
        """Return one trajectory for each delivered answer that nothing delivered follows."""
        trained: set[CapturedTurn] = set()
        found = []
        for leaf in self._leaves():
            line = leaf.line()
            found.append(_trajectory(line, [turn not in trained for turn in line]))
            trained.update(line)
        return found

    def _leaves(self) -> Iterator[CapturedTurn]:
        parents = {turn.parent for turn in self._turns if turn.delivered}
        return (turn for turn in self._turns if turn.delivered and turn not in parents)


def _trajectory(line: list[CapturedTurn], trained: list[bool]) -> CapturedTrajectory:
    messages = [message for node in line for message in (*node.asked, node.answer)]
    return CapturedTrajectory([node.turn for node in line], trained, messages, line[-1].tools)

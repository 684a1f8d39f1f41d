"""The tree of everything that was sampled for one episode's agent.

Each sampled turn follows another one, or begins a segment. Each path to a leaf is a trajectory; a
turn that several of them share is trained in the first one only. Pure.

Prompts of agents that render conversations themselves and send text or ids. Pure.

A prompt that begins with an earlier prompt and its sampled answer continues their ids. Control
tokens in such a text are meant as such.
"""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Message, StopReason, Turn


@dataclass(eq=False, slots=True)
class CapturedTurn:
    """One sampled answer: the turn, the new messages since its parent, and what was returned."""

    parent: "CapturedTurn | None"
    turn: Turn
    new_messages: list[Message]
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

    def conversation(self) -> list[Message]:
        """Return the messages from the beginning of the segment up to this answer."""
        return [message for node in self.line() for message in (*node.new_messages, node.answer)]

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
class CapturedPrompt:
    """What a request asks to continue: new messages and ids after `parent`, and all ids."""

    parent: CapturedTurn | None
    new_messages: list[Message]
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
    turns, leaf = [node.turn for node in line], line[-1]
    return CapturedTrajectory(turns, trained, leaf.conversation(), leaf.tools)


class PrefixIndex:
    """Finds the longest known sequence that another one begins with."""

    def __init__(self) -> None:
        self._known: defaultdict[tuple[int, bytes], list[CapturedTurn]] = defaultdict(list)
        self._lengths: set[int] = set()

    def add(self, sequence: Sequence[int] | str, turn: CapturedTurn) -> None:
        self._lengths.add(len(sequence))
        self._known[len(sequence), hashlib.sha256(_bytes(sequence)).digest()].append(turn)

    def longest(self, sequence: Sequence[int] | str) -> tuple[CapturedTurn | None, int]:
        """Return the turn at the end of the longest known beginning, and its length."""
        found: tuple[CapturedTurn | None, int] = None, 0
        state, at = hashlib.sha256(), 0
        for length in sorted(one for one in list(self._lengths) if one <= len(sequence)):
            state.update(_bytes(sequence[at:length]))
            at = length
            if (turn := received(self._known.get((length, state.digest()), []))) is not None:
                found = turn, length
        return found


class RawPrompts:
    """The sampled answers of one episode by the texts and ids before them."""

    def __init__(self, chat: ChatFormat, vocabulary: int) -> None:
        """Ids are below `vocabulary`."""
        self._chat, self._vocabulary = chat, vocabulary
        self._texts, self._ids = PrefixIndex(), PrefixIndex()

    def prompt(self, given: str | list[int]) -> CapturedPrompt:
        """Return the prompt of a request; raises UnusableMessages."""
        index = self._texts if isinstance(given, str) else self._ids
        known, length = index.longest(given)
        context = self._context(known, given, length)
        ids = [*known.token_ids(), *context] if known else context
        if not ids:
            raise UnusableMessages("the prompt is empty: send at least one token")
        text = given[length:] if isinstance(given, str) else self._decoded(context)
        return CapturedPrompt(known, [{"role": "user", "content": text}], context, ids)

    def remember(self, turn: CapturedTurn, given: str | list[int], text: str) -> None:
        """Know an answer by its ids, and by its text if the prompt was one."""
        self._ids.add(turn.token_ids(), turn)
        if isinstance(given, str) and text:  # without a text it would be a prefix of its own prompt
            self._texts.add(given + text, turn)

    def _context(
        self, known: CapturedTurn | None, given: str | list[int], length: int
    ) -> list[int]:
        if not isinstance(given, str):
            self._check(given)
            return given[length:]
        rest = given[length:]
        if known is not None and (stop := self._chat.stop_of(known.turn.action_ids)):
            rest = rest.removeprefix(stop)  # sampled, and not part of the text that was returned
        return self._chat.tokenizer.encode(rest, add_special_tokens=False)

    def _check(self, ids: list[int]) -> None:
        wrong = next((one for one in ids if not 0 <= one < self._vocabulary), None)
        if wrong is not None:
            raise UnusableMessages(
                f"the prompt holds the id {wrong}: the tokenizer has 0 to {self._vocabulary - 1}"
            )

    def _decoded(self, ids: list[int]) -> str:
        return self._chat.tokenizer.decode(ids, skip_special_tokens=False)


def _bytes(sequence: Sequence[int] | str) -> bytes:
    if isinstance(sequence, str):
        return sequence.encode("utf-32-le", "surrogatepass")
    return array("q", sequence).tobytes()

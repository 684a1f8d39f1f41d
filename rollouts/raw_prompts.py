"""Prompts of agents that render conversations themselves and send text or ids. Pure.

A prompt that begins with an earlier prompt and its sampled answer continues their ids. Control
tokens in such a text are meant as such.
"""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Sequence

from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.captured_turns import CapturedTurn, Prompt, received
from composer_mesh.rollouts.chat import ChatFormat


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
        for length in sorted(length for length in self._lengths if length <= len(sequence)):
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

    def prompt(self, given: str | list[int]) -> Prompt:
        """Return the prompt of a request; raises UnusableMessages."""
        index = self._texts if isinstance(given, str) else self._ids
        known, length = index.longest(given)
        context = self._context(known, given, length)
        ids = [*known.token_ids(), *context] if known else context
        if not ids:
            raise UnusableMessages("the prompt is empty: send at least one token")
        text = given[length:] if isinstance(given, str) else self._decoded(context)
        return Prompt(known, [{"role": "user", "content": text}], context, ids)

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

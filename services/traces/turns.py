"""A rollout's conversation divided by who spoke when: what came before it, then turn by turn.

The messages of a trace are divided among its turns; nothing is decoded, and nothing is drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from composer_mesh.rollouts.traces import Message, Trace, Turn


@dataclass(frozen=True, slots=True)
class Acted:
    """One action: its turn, its message, and what was answered to it.

    `message` is None where the conversation has fewer assistant messages than the rollout turns.
    """

    number: int
    turn: Turn
    message: Message | None
    answers: list[Message]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages before the first action, and the actions in their order."""

    opening: list[Message]
    turns: list[Acted]


def acted(trace: Trace) -> Conversation:
    """A rollout's conversation. An opening may hold assistant messages that nobody sampled."""
    messages = trace.messages
    places = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    own = places[max(0, len(places) - len(trace.turns)) :] if trace.turns else []
    ends = [*own[1:], len(messages)] if own else []
    spoken: Iterator[tuple[Message, list[Message]]] = (
        (messages[place], messages[place + 1 : end]) for place, end in zip(own, ends, strict=True)
    )
    found = []
    for number, turn in enumerate(trace.turns):
        message, answers = next(spoken, (None, []))
        found.append(Acted(number, turn, message, answers))
    return Conversation(messages[: own[0]] if own else list(messages), found)

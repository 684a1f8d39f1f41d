"""Division of a rollout's messages: those before the first action, then turn by turn."""

from collections.abc import Iterator
from dataclasses import dataclass

from composer_mesh.rollouts.traces import Message, Trace, Turn


@dataclass(frozen=True, slots=True)
class Acted:
    """One action: its turn, its message, and the messages in response to it.

    `message` is None if the conversation has fewer assistant messages than the rollout has turns.
    """

    number: int
    turn: Turn
    message: Message | None
    answers: list[Message]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages before the first action, and the actions in order."""

    opening: list[Message]
    turns: list[Acted]


def acted(trace: Trace) -> Conversation:
    """Divide a rollout's messages; a prompt may hold assistant messages that were not sampled."""
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

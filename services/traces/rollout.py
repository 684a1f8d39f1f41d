"""All stored data of one rollout as plain values; `rollout_page` renders them.

Division of a rollout's messages: those before the first action, then turn by turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_mesh.rollouts.hint_sources import Hint
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Message, Trace, Turn
from composer_mesh.services.store.rows import LateReward
from composer_mesh.services.traces.listing import Listed


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


@dataclass(frozen=True, slots=True)
class Paired:
    """A pair made from teachers' answers to a state of the rollout, with the outcome of the pair.

    `step` is the one that trained it, or in which it expired, counted from 1.
    """

    pair: PreferencePair
    state: str
    step: int | None


@dataclass(frozen=True)
class Rollout:
    """One rollout. `group` holds all rollouts of its prompt, including itself.

    `answer` is the verified answer, None if the task is not available. `hints` are those that the
    SDPO channel prefers, one per turn. `asked` holds the figures of the teacher queries about the
    group's states, empty if there were none. `notes` state what is missing, and why.
    """

    listed: Listed
    trace: Trace
    group: Sequence[Trace]
    answer: str | None = None
    hints: Sequence[Hint] = ()
    pairs: Sequence[Paired] = ()
    rewards: Sequence[LateReward] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            **self.listed.as_dict(),
            "answer": self.answer,
            "messages": self.trace.messages,
            "turns": [asdict(turn) for turn in self.trace.turns],
            "error_sites": [asdict(site) for site in self.trace.error_sites],
            "hints": [
                {"turn": h.turn, "source": h.source, "wording": h.wording, "text": h.text}
                for h in self.hints
            ],
            "pairs": [
                {"state": one.state, "step": one.step, **asdict(one.pair)} for one in self.pairs
            ],
            "late_rewards": [
                {
                    "reward": one.reward,
                    "source": one.source,
                    "state": str(one.state),
                    "step": None if one.step is None else one.step + 1,
                }
                for one in self.rewards
            ],
            "asked": dict(self.asked),
            "group": [
                {"trace_id": t.trace_id, "reward": t.reward, "success": t.success}
                for t in self.group
            ],
            "notes": list(self.notes),
        }

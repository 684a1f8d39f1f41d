"""All that a run knows about one rollout, as plain values; how it looks is `rollout_page`.

Nothing here reads a file: `command` brings the parts together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from composer_mesh.rollouts.hint_sources import Hint
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.store.rows import LateReward
from composer_mesh.services.traces.listing import Listed


@dataclass(frozen=True, slots=True)
class Paired:
    """A pair that teachers' answers to a state of the rollout came to, and what became of it.

    `step` is the one that took it, or in which it expired, counted from 1.
    """

    pair: PreferencePair
    state: str
    step: int | None


@dataclass(frozen=True)
class Rollout:
    """One rollout. `group` holds all of its prompt's, itself too.

    `answer` is the verified one, None where the task is not at hand. `hints` are those that the
    SDPO channel prefers, one a turn. `asked` are the figures of asking teachers about the group's
    states, empty where none were. `notes` say what could not be had, and why.
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
        """The object that `--json` prints."""
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

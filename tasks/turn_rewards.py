"""Rewards of an episode's single turns: those of its tools, and those of the task's functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.tasks.errors import UnusableTask, shown
from composer_mesh.tasks.reward import RewardFunction, finite_number
from composer_mesh.tasks.session import Session


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

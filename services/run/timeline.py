"""The timeline of a run: what each actor did for the controller, one line of a file for each step.

    {"step": 12, "began": ..., "ended": ..., "busy": [["trainer", "train", began, ended], ...]}

Times are seconds since 1970. Calls that only ask how an actor is are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_mesh.mesh.activity import Busy
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.steps.ports import Watcher

NOT_WORK = frozenset({"describe", "hang_up", "forget", "hold", "waiting", "connect", "release"})
SHORTEST_S = 0.001
MOST_OF_A_STEP = 400
"""Intervals of a step that are written, the longest ones."""


class TimelineView:
    """The display of a run that also writes the timeline, by `write`, with each step."""

    def __init__(
        self,
        view: Watcher,
        take: Callable[[], Sequence[Busy]],
        write: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._view, self._take, self._write, self._clock = view, take, write, clock
        self._take()  # what preparations did belongs to no step

    def update(self, step: Mapping[str, Any]) -> None:
        self._view.update(step)
        ended = self._clock()
        began = ended - float(step.get("time/step_s") or 0.0)
        self._write(timeline_of(int(step["step"]), began, ended, self._take()))

    def evaluation(self, evaluation: Evaluation) -> None:
        self._view.evaluation(evaluation)

    def phase(self, text: str) -> None:
        self._view.phase(text)


def timeline_of(step: int, began: float, ended: float, busy: Sequence[Busy]) -> dict[str, Any]:
    """Return the line of a step: its longest intervals, in order."""
    work = [
        one for one in busy if one.endpoint not in NOT_WORK and one.ended - one.began >= SHORTEST_S
    ]
    kept = sorted(work, key=lambda one: one.began - one.ended)[:MOST_OF_A_STEP]
    kept.sort(key=lambda one: one.began)
    return {
        "step": step,
        "began": round(began, 3),
        "ended": round(ended, 3),
        "busy": [
            [one.actor, one.endpoint, round(one.began, 3), round(one.ended, 3)] for one in kept
        ],
    }

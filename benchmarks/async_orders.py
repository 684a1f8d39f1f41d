"""Steps that take groups as they finish, within a window: an alternative that the product rejects.

A step may take a finished group before an older one that is still running, as long as it is less
than `span` groups younger than the oldest one left. The same bound on the lag then allows fewer
groups in flight: with B of them group i enters at a version v with i < vP + B, is overtaken by less
than `span` groups, and so is trained at k <= (i + span - 1) // P, hence at a lag k - v of at most
(B + span - 2) // P. That is S for B = (S + 1) P + 1 - span.
"""

import asyncio
from collections import deque
from typing import ClassVar

from composer_mesh.rollouts.window import Window
from composer_mesh.services.controller import Controller
from composer_mesh.services.schedule.step_builder import Group, StepGroups


class NarrowWindow(Window):
    """A window that holds back as many groups as may overtake one."""

    overtakers = 0

    def may_enter(self) -> bool:
        limit = (self._version + self._lag + 1) * self._size - self.overtakers
        return self._entered < min(limit, self._steps * self._size)


class Windowed(Controller):
    """A controller that takes the first groups to finish.

    With `keeps_the_bound` it keeps the bound on the lag, otherwise the number of groups in flight.
    """

    span: ClassVar[int] = 1
    keeps_the_bound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = self.config.schedule
        size, lag, steps = schedule.prompts_per_step, schedule.max_lag, self.config.run.steps
        self._window = window = NarrowWindow(size, lag, steps, self.resume_state.steps)
        window.overtakers = self.span - 1 if self.keeps_the_bound else 0
        if window.overtakers > (lag - 1) * size:
            raise ValueError(
                f"span is {self.span} but at most {(lag - 1) * size + 1} keeps the lag below "
                f"{lag + 1} with a sync beside each step: raise max_lag or lower span"
            )
        self._ids: deque[int] = deque()
        self._next_id = self.resume_state.steps * size

    def _fill_window(self) -> None:
        super()._fill_window()
        while len(self._ids) < len(self._groups.running):
            self._ids.append(self._next_id)
            self._next_id += 1

    async def _collect(self, step: int) -> StepGroups:
        taken: list[Group] = []
        running = self._groups.running
        while len(taken) < self.config.schedule.prompts_per_step:
            within = [n for n, group in enumerate(self._ids) if group < self._ids[0] + self.span]
            finished = [place for place in within if running[place].done()]
            if finished:
                taken.append(running[finished[0]].result())
                del running[finished[0]], self._ids[finished[0]]
            else:
                waiting = [running[place] for place in within]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return StepGroups(self.config.schedule, step, taken)


def windowed(span: int, keeps_the_bound: bool = True) -> type[Windowed]:
    """Return a controller whose groups are overtaken by less than `span` younger ones."""
    members = {"span": span, "keeps_the_bound": keeps_the_bound}
    return type("WindowedController", (Windowed,), members)

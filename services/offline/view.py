"""Progress display of an offline replay: a progress bar, or plain lines without a terminal."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from composer_mesh.services.offline.figures import ReplayFigures
from composer_mesh.services.offline.plan import ReplayPlan
from composer_mesh.services.offline.report import plan_lines

LINES = 10
"""Number of plain progress lines per job."""


class ReplayView:
    """Context manager that shows the progress of a planned job."""

    def __init__(self, plan: ReplayPlan, ceiling: float, console: Console) -> None:
        self._plan, self._ceiling, self._console = plan, ceiling, console
        self._states = plan.states
        self._began, self._shown = time.monotonic(), 0
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        for line in plan_lines(self._plan, self._ceiling):
            self.say(line)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("asking"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                auto_refresh=False,  # rich does not join its refresh thread
            )
            self._task = self._progress.add_task("states", total=self._states)
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def tell(self, figures: ReplayFigures) -> None:
        """Show the current figures."""
        if self._progress is not None:
            text = f"states, {figures.kept} pairs, ${figures.usd:.4f} of ${self._ceiling:.2f}"
            self._progress.update(
                self._task, completed=figures.states, description=text, refresh=True
            )
            return
        part = figures.states * LINES // max(1, self._states)
        if part > self._shown:
            self._shown = part
            self.say(self._line(figures))

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        self._console.print(Text(text), soft_wrap=True)

    def _line(self, figures: ReplayFigures) -> str:
        return (
            f"replay states={figures.states}/{self._states} groups={figures.groups}"
            f" pairs={figures.kept} usd={figures.usd:.4f}"
            f" short_of_budget={len(figures.short_of_budget)}"
            f" elapsed_s={time.monotonic() - self._began:.1f}"
        )

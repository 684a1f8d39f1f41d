"""The `composer-mesh replay` command: stored traces to preference pairs, priced and reported.

Selection, queries, votes and filters are those of a training run; no mesh is started.
"""

import asyncio
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.loop_watchdog import watch_this_loop
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.pairs import pair_record
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.offline.config import offline_config
from composer_mesh.services.offline.job import OfflineJob, ReplayFigures, ReplayPlan, plan_job
from composer_mesh.services.offline.options import ReplayOptions
from composer_mesh.services.offline.output import (
    FINISHED,
    OUT_OF_BUDGET,
    REPORT_FILE,
    STOPPED,
    ReplayOutput,
    job_of,
    plan_lines,
    plan_page,
    replay_report,
    report_page,
    write_json,
)
from composer_mesh.services.offline.session import TeacherClient, opened_panel, priced_teachers
from composer_mesh.services.offline.traces import TraceIndex, index_traces
from composer_mesh.services.schedule.stopping import (
    NUMBERS,
    CommandSignals,
    Stopping,
    until_interrupted,
)
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.task import Task

NOBODY_ANSWERED, SHORT_OF_BUDGET = 1, 3


def replay_command(
    options: ReplayOptions,
    signals: CommandSignals,
    *,
    environ: Mapping[str, str] = os.environ,
    transport: httpx.AsyncBaseTransport | None = None,
) -> int:
    """Run the command and return the exit status; `transport` replaces the network.

    API keys are read from `environ`. The status is 0 when every query was made, 3 when the budget
    prevented some, 1 when no query was answered, 130 after Ctrl-C, 143 after SIGTERM. Raises
    `ReplayRefused`, `TraceFileError`, `ConfigError` or `DataError` before any query.
    """
    index = index_traces(options.traces)
    config = offline_config(index, options.teachers, options.overrides, options.max_usd)
    work = _Work(options, index, config, make_task(config), Console(), environ, transport)
    signals.hold()
    if options.dry_run:
        return asyncio.run(until_interrupted(work.price(), signals))
    assert options.out is not None, "the options refuse a replay without a place"
    with ReplayOutput.open(options.out, job_of(config, index.mark)) as output:
        replay = work.replay(output, signals)
        return asyncio.run(until_interrupted(replay, signals, work.stopping, None, NUMBERS))


@dataclass
class _Work:
    """A validated replay job."""

    options: ReplayOptions
    index: TraceIndex
    config: Config
    task: Task
    console: Console
    environ: Mapping[str, str]
    transport: httpx.AsyncBaseTransport | None
    stopping: Stopping = field(default_factory=Stopping)

    async def price(self) -> int:
        """Print the price of the job."""
        teachers = await priced_teachers(
            self.config, environ=self.environ, transport=self.transport
        )
        plan = self._plan(teachers)
        if self.options.report is not None:
            write_json(self.options.report, {"state": "dry_run", **plan.as_dict()})
        self.console.print(plan_page(plan, self.config.replay.budget.usd))
        return 0

    async def replay(self, output: ReplayOutput, signals: CommandSignals) -> int:
        """Query the teachers, write pairs and report. Waits for the teachers."""
        watch_this_loop("controller")
        async with self._panel(output) as panel:
            plan = self._plan(panel.teachers)
            teacher_client = TeacherClient(panel, self.options.concurrency)
            with ReplayView(plan, self.config.replay.budget.usd, self.console) as view:
                job = await asyncio.to_thread(  # it imports the libraries of the filters
                    OfflineJob, self.config, teacher_client, self.options.concurrency, view.tell
                )
                ending = _Ending(teacher_client, view, self.stopping)
                try:
                    await ending.of(job.run(self.index.groups(), self.options.limit))
                finally:
                    output.write_pairs(pair_record(pair, self.task.tools) for pair in job.pairs)
            report = await self._report(job, plan, panel, ending)
        output.write_report(report, self.options.report)
        self._tell(output, report)
        return signals.status if ending.early else _status(report)

    def _panel(self, output: ReplayOutput) -> AbstractAsyncContextManager[TeacherPanel]:
        return opened_panel(
            self.config,
            self.task,
            output.folder,
            tools=self.task.tools,
            environ=self.environ,
            transport=self.transport,
        )

    def _plan(self, teachers: Sequence[TeacherEndpoint]) -> ReplayPlan:
        groups = self.index.groups()
        return plan_job(self.config, groups, teachers, self.task.tools, self.options.limit)

    async def _report(
        self, job: OfflineJob, plan: ReplayPlan, panel: TeacherPanel, ending: "_Ending"
    ) -> dict[str, Any]:
        state = OUT_OF_BUDGET if job.figures.short_of_budget else FINISHED
        ledger, usd = await panel.report(), self.config.replay.budget.usd
        seconds = time.monotonic() - ending.began
        state = STOPPED if ending.early else state
        return replay_report(job.figures, plan, ledger, usd, state, seconds)

    def _tell(self, output: ReplayOutput, report: dict[str, Any]) -> None:
        self.console.print(report_page(report))
        lines = [f"pairs: {output.out}", f"report: {output.folder / REPORT_FILE}"]
        if self.index.cut:
            lines.append(f"left out: {self.index.cut} last line that its writer did not finish")
        if report["state"] == OUT_OF_BUDGET:
            lines.append(
                "the ceiling kept teachers from some states: continue with the same command and a "
                "higher --max-usd; what was answered is not paid again"
            )
        elif report["state"] == STOPPED:
            lines.append("continue with the same command: what was answered is not paid again")
        for line in lines:
            self.console.print(plain_text(line), markup=False, highlight=False, soft_wrap=True)


class _Ending:
    """Runs the job until it ends or a signal stops it.

    After the first SIGINT or SIGTERM no new query is sent, but queries in flight are awaited,
    because they are paid for; the second signal cancels them. The result is reported either way.
    """

    def __init__(
        self, teacher_client: TeacherClient, view: "ReplayView", stopping: Stopping
    ) -> None:
        self._teacher_client, self._view, self._stopping = teacher_client, view, stopping
        self.began = time.monotonic()

    @property
    def early(self) -> bool:
        """Whether a signal ended it."""
        return self._stopping.requested or self._stopping.stopped

    async def of(self, work: Coroutine[Any, Any, bool]) -> None:
        """Wait for the job; raise its exception."""
        job, stop_request = asyncio.create_task(work), asyncio.create_task(self._stop_asking())
        self._stopping.cancels(job)
        self._stopping.finishes_step = True
        try:
            await asyncio.wait([job])
        finally:
            self._stopping.mark_over()
            await cancel_and_wait([job, stop_request])
        if not job.cancelled():
            job.result()

    async def _stop_asking(self) -> None:
        await self._stopping.until_requested()
        self._teacher_client.stop()
        self._view.say(
            "stopping: waiting for the answers in flight, which are paid; a second signal drops "
            "them"
        )


def _status(report: dict[str, Any]) -> int:
    states = report["states"]
    if report["state"] == OUT_OF_BUDGET:
        return SHORT_OF_BUDGET
    return NOBODY_ANSWERED if states["asked"] and not states["answered"] else 0


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
                TextColumn("querying"),
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

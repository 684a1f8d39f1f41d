"""Judges for commands that run a task in their own process: `play` and `eval URL`.

The same client, ceiling and cache as those of a run, on a thread of their own. The keys are in this
process, where the task's code runs too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from composer_mesh.actors.panel.configured import judge_settings
from composer_mesh.actors.panel.panel import TeacherPanel
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import LoopThread
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply, reply_of
from composer_mesh.tasks.task import Task


class LocalJudges:
    """The port `Judges` over a panel, which lives on another event loop."""

    def __init__(self, panel: TeacherPanel, thread: LoopThread) -> None:
        self._panel, self._thread = panel, thread

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Return a judge's answer. Waits for it, at most `judges.timeout_s`."""
        asking = self._panel.ask_one(question.judge, question.messages)
        return reply_of(question.judge, await self._thread.run(asking))


@contextmanager
def local_judges(
    config: Config, task: Task, run: Path | None, transport: httpx.AsyncBaseTransport | None = None
) -> Iterator[None]:
    """Give a task the judges of a config, if it has any, while the block runs.

    What they cost is written to a ledger in the directory `run`, if one is given. Raises where a
    judge or a file cannot be used. `transport` replaces the network.
    """
    if not config.judges.on:
        yield
        return
    thread = LoopThread("judges")
    try:
        opening = TeacherPanel.open(judge_settings(config, run), transport=transport)
        panel = thread.run_blocking(opening)
        try:
            task.use_judges(LocalJudges(panel, thread))
            yield
        finally:
            thread.run_blocking(panel.aclose())
    finally:
        thread.close()

"""Environments of verifiers 0.4 as a workflow, and the task that names their rows.

    [data]
    task = "composer_mesh.plugins.frameworks.verifiers.workflow:VerifiersTask"
    options = { tasks = 1000 }

    [rollouts]
    workflow = "composer_mesh.plugins.frameworks.verifiers.workflow:VerifiersEnvironment"
    options = { env = { taskset = { id = "…" }, agent = { … } } }

verifiers plays the episode and scores it; what its agents sample is captured by the endpoint of the
episode, token by token (docs/verifiers.md).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from composer_mesh.plugins.frameworks.verifiers.driver_process import (
    DriverProcess,
    DriverTrace,
    EpisodeFailed,
)
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.workflow import Agent, Engine, Trajectory, Workflow

PYTHON = Path(".nox/verifiers/bin/python")


class VerifiersTask(Task):
    """The rows of a taskset, by their numbers; verifiers has the rows themselves."""

    name = "verifiers"

    def __init__(self, tasks: int) -> None:
        """The first `tasks` of the taskset are used, of which each `data.heldout_every`-th is held
        out."""
        self._tasks = tasks

    def load(self) -> None:
        if self._tasks < self.settings.heldout_every:
            raise UnusableTask(
                f"data.options.tasks is {self._tasks} and each {self.settings.heldout_every}-th "
                "task is held out: raise it, or lower data.heldout_every"
            )

    def rows(self, split: Split) -> Sequence[Row]:
        every = self.settings.heldout_every
        return [
            {"task": index}
            for index in range(self._tasks)
            if (index % every == every - 1) == (split == "heldout")
        ]

    def prompt(self, row: Row) -> str:
        return f"Task {row['task']} of the taskset; verifiers has its prompt."


class VerifiersEnvironment(Workflow):
    """Plays each episode in an environment of verifiers, which is in a process of its own."""

    def __init__(
        self,
        env: Mapping[str, Any],
        python: str | None = None,
        client: Literal["eval", "train"] = "eval",
        renderer: str | None = None,
        max_concurrent: int = 32,
        success_at: float = 1.0,
        start_s: float = 300.0,
    ) -> None:
        """`env` is the table of the same name in configs of verifiers; `python` has verifiers.

        The client "train" renders conversations by `renderer`, a folder with the policy's
        tokenizer. A process plays `max_concurrent` episodes at once.
        """
        if client == "train" and renderer is None:
            raise UnusableTask(
                'client = "train" renders conversations itself: give renderer, a folder with the '
                "policy's tokenizer, in rollouts.options"
            )
        self._python = _usable(Path(python) if python is not None else PYTHON)
        self._settings = {
            "env": dict(env),
            "client": client,
            "renderer": renderer,
            "max_concurrent": max_concurrent,
        }
        self._success_at, self._start_s = success_at, start_s
        self._starting = threading.Lock()
        self._driver = self._started()

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:
        driver = await asyncio.to_thread(self._living)
        async with engine.agent() as agent:
            played = await driver.play(episode.payload["task"], agent.base_url, agent.api_key)
        scored = played.scored()
        several = len({trace.agent for trace in scored}) > 1
        found = [one for trace in scored for one in self._trajectories(agent, trace, several)]
        if not found:
            raise EpisodeFailed(
                "the agents of verifiers have requested nothing of the endpoint: leave model and "
                "client of trained agents out of env"
            )
        return found

    def _trajectories(self, agent: Agent, trace: DriverTrace, several: bool) -> list[Trajectory]:
        return agent.trajectories(
            trace.reward,
            success=trace.reward >= self._success_at,
            role=trace.agent if several else "",
            rewards=trace.values(),
            session=trace.session,
        )

    def _living(self) -> DriverProcess:
        """Return the driver; a new one in place of one that has ended. Waits for its start."""
        with self._starting:
            if self._driver.lost:
                self._driver.close()
                self._driver = self._started()
            return self._driver

    def _started(self) -> DriverProcess:
        return DriverProcess(self._python, self._settings, self._start_s)


def _usable(python: Path) -> Path:
    """Return an interpreter's whole path, its link not followed; raise UnusableTask."""
    whole = python.absolute()
    if not os.access(whole, os.X_OK) or whole.is_dir():
        raise UnusableTask(
            f"there is no interpreter {whole}: make an environment of verifiers with `python "
            "-m venv DIR && DIR/bin/pip install verifiers==0.4.0 uv`, and name its python in "
            "rollouts.options"
        )
    return whole

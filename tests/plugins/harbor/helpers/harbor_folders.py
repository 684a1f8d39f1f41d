"""Folders of Harbor tasks for tests, and episodes of them in containers that are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fake_containers import FakeContainers

from composer_mesh.plugins.harbor.session import HarborSession
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.tasks import Outcome, StepResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

TOML = '[agent]\ntimeout_sec = 100\n[environment]\ndocker_image = "python:3.11-slim"\n'
TESTS = "#!/bin/bash\nexpect /app/word.txt hello\n"
FILES: Mapping[str, str] = {
    "task.toml": TOML,
    "instruction.md": "Write hello to word.txt.\n",
    "tests/test.sh": TESTS,
    "solution/solve.sh": "#!/bin/bash\nwrite word.txt hello\n",
}


def written(folder: Path, files: Mapping[str, str] = {}) -> Path:
    """Write a task: `FILES`, with those of `files` in their place; an empty text removes one."""
    for name, text in {**FILES, **files}.items():
        if text:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


def made(path: Path, containers: FakeContainers | None = None, **options: Any) -> HarborTask:
    """Return the task of a folder."""
    task = HarborTask.create(TaskSettings(path=path, max_turns=30), **options)
    task.sandbox = containers or FakeContainers()  # type: ignore[assignment]
    return task


async def played(task: HarborTask, actions: Sequence[str]) -> tuple[Outcome, list[StepResult]]:
    """Play an episode by actions; close it; return its outcome and its steps."""
    running = RunningEpisode(task, task.episode("train", 0))
    steps: list[StepResult] = []
    try:
        await running.begin()
        for action in actions:
            steps.append(await running.step(action))
            if steps[-1].done:
                break
        return await running.outcome(), steps
    finally:
        await running.close()


def bash(command: str, **arguments: Any) -> str:
    """Return the call of a command."""
    return call_text("bash", {"command": command, **arguments})


SUBMIT = call_text("submit", {})


def session_of(running: RunningEpisode) -> HarborSession:
    """Return the session of a running episode."""
    session = running._session
    assert isinstance(session, HarborSession)
    return session

"""Grades made tasks by the real tools and judge: original work is worth 1, empty work 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.plugins.code_tasks.making.features import spread
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.rollouts.tasks import Episode, Outcome
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.calls import Calls
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.sandbox import Sandbox, SandboxError
from composer_mesh.tasks.task import TaskSettings

SPLITS: tuple[Split, ...] = ("train", "heldout")
EMPTY = (call_text("submit", {}),)
ATTEMPTS = 3
TOLD_EVERY = 100
"""Tasks after which progress is told."""


@dataclass(frozen=True)
class RightTasks:
    """Names of the tasks that were graded rightly each time, and whether these are all."""

    tasks: frozenset[str]
    all: bool


async def check_tasks(
    sandbox: Sandbox,
    path: Path,
    sample: int | None,
    gradings: int,
    at_once: int,
    say: Callable[[str], None],
) -> RightTasks:
    """Grade tasks of a file, and tell what is graded wrongly.

    Waits for boxes; raises SandboxError where one fails.
    """
    started = time.monotonic()
    task = CodeTask.create(TaskSettings(path=path, heldout_every=2, max_turns=100))
    await task.check_sandbox(sandbox)
    task.sandbox = sandbox
    rows = {task.identity(row): (split, row) for split in SPLITS for row in task.rows(split) or ()}
    names = list(rows) if sample is None else spread(list(rows), sample)
    slots = asyncio.Semaphore(at_once)

    async def one(name: str) -> tuple[str, list[str]]:
        async with slots:
            return name, await faults_of(task, *rows[name], gradings)

    wrong, right = 0, set[str]()
    for count, graded in enumerate(asyncio.as_completed([one(name) for name in names]), 1):
        name, faults = await graded
        right |= set() if faults else {name}
        for fault in faults:
            wrong += 1
            say(fault)
        if count % TOLD_EVERY == 0 and count < len(names):
            say(f"{count} of {len(names)} tasks graded ({time.monotonic() - started:.0f} s)")
    say(
        f"{len(names)} tasks graded {gradings} times: {wrong} gradings are wrong "
        f"({time.monotonic() - started:.0f} s)"
    )
    return RightTasks(frozenset(right), not wrong)


def copy_tasks(source: Path, target: Path, names: Collection[str]) -> int:
    """Write the tasks of a file that have these names, and the trees that they need; return how
    many tasks."""
    lines = source.read_text(encoding="utf-8").splitlines()
    rows = [(json.loads(line), line) for line in lines if line.strip()]
    tasks = [(row, line) for row, line in rows if row.get("name") in names]
    trees = {row.get("tree") for row, _ in tasks}
    kept = {line for _, line in tasks}
    kept |= {line for row, line in rows if "name" not in row and row.get("tree") in trees}
    target.write_text("".join(f"{line}\n" for _, line in rows if line in kept), encoding="utf-8")
    return len(tasks)


async def faults_of(task: CodeTask, split: Split, row: Row, gradings: int) -> list[str]:
    """Return what is wrong with the rewards of gold and of empty work on a task."""
    faults = []
    for _ in range(gradings):
        gold = await played(task, split, row, task.gold(row))
        if gold.reward != 1.0 or not gold.success:
            faults.append(f"{task.identity(row)}: original work is worth {gold.reward:g}")
        empty = await played(task, split, row, EMPTY)
        if empty.reward != 0.0 or empty.success:
            faults.append(f"{task.identity(row)}: empty work is worth {empty.reward:g}")
    return faults


async def played(task: CodeTask, split: Split, row: Row, actions: Sequence[str]) -> Outcome:
    """Play an episode with stated actions; return how it is scored.

    An episode whose box fails is played again; raises SandboxError where that happens each time.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(SandboxError):
            return await _played_once(task, split, row, actions)
    return await _played_once(task, split, row, actions)


async def _played_once(task: CodeTask, split: Split, row: Row, actions: Sequence[str]) -> Outcome:
    episode = RunningEpisode(task, Episode(task.name, split, 0, row), Calls())
    try:
        await episode.begin()
        for action in actions:
            await episode.step(action)
        return await episode.outcome()
    finally:
        await episode.close()

"""Plays every episode of a task by a script: its gold actions, or empty answers.

A task is as it should be where the first solve each episode, and the second none. Everything is
played as in a run, with the limits of its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Literal

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Split
from composer_mesh.services.checks.task import in_a_daemon_thread
from composer_mesh.tasks.errors import TaskError, UnusableTask, shown
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskRunner

Script = Literal["gold", "empty"]
AT_ONCE = 4
MOST_NAMED = 10
LONGEST_NAME, LONGEST_REASON = 80, 500
SPLITS: tuple[Split, ...] = ("train", "heldout")


def describe_scripts(config: Config, task: Task, scripts: Sequence[Script]) -> Iterator[str]:
    """Yield a line for each task and script; raises UnusableTask that names wrong episodes."""
    for part in task.parts:
        for script in scripts:
            episodes = list(_episodes(config, part))
            wrong = asyncio.run(_wrong(config, part, episodes, script))
            what = "gold actions" if script == "gold" else "empty answers"
            if wrong:
                listed = "; ".join(wrong[:MOST_NAMED])
                rest = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
                should = "do not solve" if script == "gold" else "solve"
                raise UnusableTask(
                    f"{what} {should} {len(wrong)} of {len(episodes)} episodes of task "
                    f"{part.name!r}: {listed}{rest}. Mend or remove them"
                )
            solved = len(episodes) if script == "gold" else 0
            yield f"task {part.name!r}: {what} solve {solved} of {len(episodes)} episodes"


def _episodes(config: Config, task: Task) -> Iterator[Episode]:
    """Yield each problem once; of generated ones, those that are evaluated."""
    seen = set()
    for split in SPLITS:
        rows = task.rows(split)
        generated = config.eval.episodes if split == "heldout" else 0
        for index in range(generated if rows is None else len(rows)):
            episode = task.episode(split, index)
            identity = task.identity(episode.payload)
            if identity not in seen:
                seen.add(identity)
                yield episode


async def _wrong(
    config: Config, task: Task, episodes: Sequence[Episode], script: Script
) -> list[str]:
    """Return the episodes in which a script does not do what it should, each with the reason."""
    runner = TaskRunner(task, config.environment.call_s, run_plain=in_a_daemon_thread)
    slots = asyncio.Semaphore(AT_ONCE)

    async def reason(episode: Episode) -> str:
        async with slots:
            try:
                return await _played(runner, episode, script)
            except TaskError as error:
                return shown(error, LONGEST_REASON)

    reasons = await asyncio.gather(*map(reason, episodes))
    named = [shown(task.identity(one.payload), LONGEST_NAME) for one in episodes]
    return [f"{name} ({why})" for name, why in zip(named, reasons, strict=True) if why]


async def _played(runner: TaskRunner, episode: Episode, script: Script) -> str:
    """Play an episode; return why it is wrong, or nothing."""
    task, actions = runner.task, list[str]()
    if script == "gold":
        what = f"the gold actions of task {task.name!r}"
        actions = list(await runner.run(runner.calls(what, task.gold, episode.payload)))
        if not actions:
            return "it states none"
    running, _ = await runner.run(runner.begin_episode(episode))
    try:
        return await _scored(runner, running, actions, script)
    finally:
        await runner.run(running.close())


async def _scored(
    runner: TaskRunner, running: RunningEpisode, actions: Sequence[str], script: Script
) -> str:
    done, turn = False, 0
    while not done:
        step = await runner.run(running.step(actions[turn] if turn < len(actions) else ""))
        done, turn = step.done, turn + 1
    outcome = await runner.run(running.outcome())
    as_it_should = outcome.success == (script == "gold")
    return "" if as_it_should else f"reward {outcome.reward:g}"

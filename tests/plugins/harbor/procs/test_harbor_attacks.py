"""Known ways to cheat the tests of terminal tasks solve nothing, and honest work is not flagged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor_attacks import FOUND, HELD, HONEST, PYTHON, SHELL
from harbor_folders import bash
from python_image import python_root, with_image

from composer_mesh.plugins.harbor.containers.opening import open_containers
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.tasks import Outcome
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A folder of two tasks, and containers; a test says why there are none."""
    folder = tmp_path_factory.mktemp("attacks")
    try:
        containers = open_containers("bubblewrap", cache=str(folder / "cache"), most=2)
    except UnusableTask as error:
        pytest.skip(str(error))
    root = python_root(folder / "root")
    for name in ("write-hello", "fix-average"):
        with_image(EXAMPLES / name, folder / name, root)
    yield folder, containers
    asyncio.run(containers.close())


async def attacked(opened: tuple[Path, Any], name: str, *commands: str, **options: Any) -> Outcome:
    """Play commands in an episode of a task, then an answer; return the outcome."""
    folder, containers = opened
    task = HarborTask.create(TaskSettings(path=folder / name, max_turns=20), **options)
    task.sandbox = containers
    running = RunningEpisode(task, task.episode("train", 0))
    try:
        await running.begin()
        for command in commands:
            await running.step(bash(command))
        await running.step("done")
        return await running.outcome()
    finally:
        await running.close()


@pytest.mark.parametrize("attack", [*SHELL, *PYTHON])
async def test_no_attack_passes_the_tests(opened: tuple[Path, Any], attack: str) -> None:
    name = "write-hello" if attack in SHELL else "fix-average"
    found = await attacked(opened, name, {**SHELL, **PYTHON}[attack])
    assert (found.reward, found.success) == (0.0, False)
    if attack in FOUND:
        assert found.rewards[f"flag/{FOUND[attack]}"] == 1.0


@pytest.mark.parametrize("attack", HELD)
async def test_what_voids_a_reward_is_what_holds_an_attack(
    opened: tuple[Path, Any], attack: str
) -> None:
    command = {**SHELL, **PYTHON}[attack]
    found = await attacked(opened, HELD[attack], command, void=[])
    assert found.reward == 1.0


@pytest.mark.parametrize("work", HONEST)
async def test_honest_work_is_rewarded_and_not_flagged(opened: tuple[Path, Any], work: str) -> None:
    found = await attacked(opened, "write-hello", HONEST[work], "echo hello > word.txt")
    assert (found.reward, found.rewards["flagged"]) == (1.0, 0.0)
    found = await attacked(
        opened, "fix-average", HONEST[work], "sed -i 's#len(numbers) - 1#len(numbers)#' average.py"
    )
    assert (found.reward, found.rewards["flagged"]) == (1.0, 0.0)

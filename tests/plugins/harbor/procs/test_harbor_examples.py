"""The thirty example tasks in real containers: the oracle solves all of them, and nothing none."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor_attacks import PLANT
from harbor_folders import SUBMIT, bash
from python_image import python_root, with_image

from composer_mesh.plugins.harbor.containers.opening import open_containers
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"
CONFIG = """
[run]
name = "harbor"
steps = 1
[data]
task = "harbor"
path = "{tasks}"
[environment]
max_turns = 20
[environment.sandbox]
kind = "containers"
options = {{backend = "bubblewrap", cache = "{cache}", most = 2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks with an image on disk, and a cache of images next to them."""
    folder = tmp_path_factory.mktemp("harbor")
    with_image(EXAMPLES, folder / "tasks", python_root(folder / "root"))
    return folder


@pytest.fixture(scope="module")
def containers(folder: Path) -> Iterator[Any]:
    """Containers of this machine; a test says why there are none."""
    try:
        opened = open_containers("bubblewrap", cache=str(folder / "cache"), most=2)
    except UnusableTask as error:
        pytest.skip(str(error))
    yield opened
    asyncio.run(opened.close())


def loaded(folder: Path, containers: Any, name: str = "", **options: Any) -> HarborTask:
    path = folder / "tasks" / name
    task = HarborTask.create(TaskSettings(path=path, max_turns=20), **options)
    task.sandbox = containers
    return task


async def played(task: HarborTask, name: str, actions: list[str]) -> tuple[float, list[str]]:
    """Play an episode of a task; return its reward, and what the agent was shown."""
    rows = [*(task.rows("train") or []), *(task.rows("heldout") or [])]
    index = next(n for n, row in enumerate(rows) if row["name"] == name)
    split, place = (
        ("train", index)
        if index < len(task.rows("train") or [])
        else (
            "heldout",
            index - len(task.rows("train") or []),
        )
    )
    running = RunningEpisode(task, task.episode(split, place))
    shown: list[str] = []
    try:
        shown.append(str((await running.begin())[0]["content"]))
        for action in actions:
            step = await running.step(action)
            shown += [str(one["content"]) for one in step.messages]
            if step.done:
                break
        return (await running.outcome()).reward, shown
    finally:
        await running.close()


@pytest.mark.usefixtures("containers")
def test_check_plays_the_oracle_and_an_empty_answer_of_every_task(folder: Path) -> None:
    config = folder / "harbor.toml"
    config.write_text(CONFIG.format(tasks=folder / "tasks", cache=folder / "cache"))
    command = [sys.executable, "-m", "composer_mesh", "check", str(config), "--gold", "--empty"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "gold actions solve 30 of 30 episodes" in said
    assert "empty answers solve 0 of 30 episodes" in said
    assert "30 Harbor tasks" in said


async def test_planted_rewards_and_a_background_writer_solve_no_task(
    folder: Path, containers: Any
) -> None:
    task = loaded(folder, containers)
    names = sorted(one.name for one in (folder / "tasks").iterdir() if one.is_dir())
    attack = bash(f"{PLANT}; (while :; do {PLANT}; done) > /dev/null 2>&1 &")
    gathered = await asyncio.gather(*(played(task, n, [attack, "done"]) for n in names))
    assert {name: reward for name, (reward, _) in zip(names, gathered, strict=True) if reward} == {}
    assert len(names) == 30


async def test_a_server_in_the_container_keeps_its_state_between_calls(
    folder: Path, containers: Any
) -> None:
    def add(number: int) -> str:
        asked = {"server": "counter", "tool": "add", "arguments": {"number": number}}
        return call_text("call_mcp_tool", asked)

    task = loaded(folder, containers, "mcp-counter")
    unknown = call_text("call_mcp_tool", {"server": "counter", "tool": "b", "arguments": {}})
    actions = [add(7), unknown, add(5), bash("echo 12 > counter.txt"), SUBMIT]
    reward, shown = await played(task, "mcp-counter", actions)
    assert reward == 1.0
    assert "server counter" in shown[0]
    assert shown[1::2][:2] == ["7", "12"]
    assert "has a tool 'b'; there are counter: add" in shown[2]


async def test_files_and_processes_stay_between_commands(folder: Path, containers: Any) -> None:
    task = loaded(folder, containers, "write-hello")
    actions = [
        bash("(sleep 600) > /dev/null 2>&1 & echo $! > pid; cd /tmp; export A=1"),
        bash("kill -0 $(cat pid) && pwd && echo ${A:-none}"),
        call_text("write_file", {"path": "deep/a.txt", "content": "one\ntwo\nthree\n"}),
        call_text("read_file", {"path": "/app/deep/a.txt", "first_line": 2, "lines": 1}),
        bash("sleep 60", timeout_s=1),
        bash("echo hello > word.txt"),
        SUBMIT,
    ]
    reward, shown = await played(task, "write-hello", actions)
    assert reward == 1.0
    assert shown[2] == "/app\nnone\nexit code 0"
    assert shown[4] == "two\n"
    assert "took too long" in shown[5]


STEPS = """

[[steps]]
name = "one"

[[steps]]
name = "two"
"""


async def test_each_step_has_servers_and_an_image_of_no_earlier_tests(
    folder: Path, containers: Any
) -> None:
    place = folder / "tasks" / "mcp-steps"
    shutil.copytree(folder / "tasks" / "mcp-counter", place)
    (place / "task.toml").write_text((place / "task.toml").read_text() + STEPS)
    for name in ("one", "two"):
        (place / "steps" / name).mkdir(parents=True)
        (place / "steps" / name / "instruction.md").write_text(f"Step {name}.")
    try:
        params = {"server": "counter", "tool": "add", "arguments": {"number": 7}}
        add = call_text("call_mcp_tool", params)
        write = bash("ls /tests 2> /dev/null; echo 12 > counter.txt")
        actions = [add, write, SUBMIT, add, write, SUBMIT]
        reward, shown = await played(loaded(folder, containers, "mcp-steps"), "mcp-steps", actions)
    finally:
        shutil.rmtree(place)
    assert reward == 1.0
    assert shown[1:] == ["7", "exit code 0", "Step two.", "7", "exit code 0"]

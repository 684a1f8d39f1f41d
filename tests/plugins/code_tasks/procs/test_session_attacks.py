"""Attacks by commands that an agent runs: what was deleted is nowhere, and no command stays.

Each is played with the tools of an agent, in boxes whose packages come from a folder full of leaks.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from attacked_task import write_tasks
from code_attacks import RUNTIME, TASK, TREES
from knowledge_attacks import KNOWLEDGE, leaky_folder
from real_boxes import why_no_boxes
from sandbox_attempts import ATTEMPTS
from session_attacks import COMMANDS, MARK

from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.plugins.code_tasks.work import CodeWork
from composer_mesh.rollouts.tasks import Outcome
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

LISTED = 66
"""Attacks on the list that the battery follows."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CodeTask]:
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    leaks = leaky_folder(tmp_path_factory.mktemp("leaks"), copies=False)
    file = write_tasks(tmp_path_factory.mktemp("attacked") / "tasks.jsonl")
    made = CodeTask.create(TaskSettings(path=file, max_turns=20), command_s=60.0)
    made.sandbox = Boxes(boxes=2, folders=[leaks])
    yield made
    asyncio.run(made.sandbox.close())


async def played(task: CodeTask, *commands: str) -> tuple[list[str], CodeWork, Outcome]:
    """Run Python sources one after the other, then submit; return what each said."""
    episode = RunningEpisode(task, task.episode("train", 0), TaskCalls())
    await episode.begin()
    said = []
    for source in commands:
        step = await episode.step(call_text("run_command", {"command": ["python3", "-c", source]}))
        said.append(str(step.messages[0]["content"]))
    await episode.step(call_text("submit", {}))
    outcome = await episode.outcome()
    work = episode._session
    assert isinstance(work, CodeWork)
    await episode.close()
    return said, work, outcome


@pytest.mark.parametrize("attack", KNOWLEDGE)
def test_an_attack_on_knowledge_finds_it_where_it_is(attack: str, tmp_path: Path) -> None:
    work, leaks = tmp_path / "work", leaky_folder(tmp_path / "leaks", copies=True)
    for path, content in TASK.files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(content)
    told = subprocess.run(
        [sys.executable, "-I", "-c", KNOWLEDGE[attack], str(leaks)],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 1, told
    assert told.stdout.startswith("TOOK"), told


@pytest.mark.parametrize("attack", KNOWLEDGE)
async def test_an_agent_finds_nothing_of_what_was_deleted(attack: str, task: CodeTask) -> None:
    said, work, outcome = await played(task, KNOWLEDGE[attack])
    assert said[0].startswith("exit code 0"), said
    assert "lib/calc.py" not in work.edits
    assert (outcome.success, work.judgement.tests) == (False, 0.0)
    assert work.judgement.failed == TASK.fail_to_pass


@pytest.mark.parametrize("attack", COMMANDS)
async def test_no_command_of_an_agent_makes_the_judge_right(attack: str, task: CodeTask) -> None:
    said, work, outcome = await played(task, COMMANDS[attack].source)
    assert MARK in said[0], said
    assert not outcome.success
    assert set(work.judgement.failed) >= set(TASK.fail_to_pass)
    assert set(COMMANDS[attack].flags) <= set(work.judgement.flags)
    assert not set(work.edits) & set(COMMANDS[attack].kept_out)


async def test_a_daemon_edits_nothing_after_its_command(task: CodeTask) -> None:
    look = "import os; print(sorted(os.listdir('.')), len(os.listdir('/proc')))"
    said, work, outcome = await played(task, COMMANDS["63 a daemon"].source, look, look)
    assert "late.txt" not in said[1] + said[2]
    assert said[1] == said[2]
    assert "tests/test_calc.py" not in work.edits
    assert not outcome.success


def test_at_least_60_attacks_of_the_list_are_tests() -> None:
    names: Mapping[str, object] = {**ATTEMPTS, **COMMANDS}
    numbers = {one.number for one in (*TREES, *RUNTIME)}
    numbers |= {int(one[:2]) for one in names if one[:2].isdigit()}
    assert numbers <= set(range(1, LISTED + 1))
    assert len(numbers) >= 60
    assert numbers >= {*range(1, 55), *range(56, LISTED + 1)}
    assert os.environ.get("COMPOSER_MESH_SECRET") is None

"""A harness program in a real box: its turns are captured, its work is tested, it reaches no more.

The harness is a script of the tests, so that no package is needed.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_harness
from agent_templates import FAMILIES
from chat_templates import with_template
from harbor_folders import bash, written
from harness_episodes import harness_trace
from python_image import python_root
from scripted_generation import ScriptedGeneration

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.plugins.harbor.containers.opening import open_containers
from composer_mesh.plugins.harbor.harness import PROGRAM
from composer_mesh.plugins.harbor.machine import TaskFailure
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.task import TaskSettings

ACTIONS = (bash("echo hello > word.txt"), bash("cat word.txt"), "done")
TESTS = """#!/bin/sh
cd /app
[ "$(cat word.txt)" = hello ] && [ "$(cat reached.txt)" = nothing ] && reward=1
echo "${reward:-0}" > /logs/verifier/reward.txt
"""
TOML = '[agent]\ntimeout_sec = 100\n[environment]\nworkdir = "/app"\ndocker_image = "rootfs:{}"\n'


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter, with an image, a task and the harness."""
    folder = entered_folder()
    root = python_root(folder / "root")
    written(folder / "task", {"task.toml": TOML.format(root), "tests/test.sh": TESTS})
    (folder / "program").mkdir()
    shutil.copy(small_harness.__file__, folder / "program")
    return folder


@pytest.fixture(scope="module")
def containers(folder: Path) -> Iterator[Any]:
    """Containers of this machine; a test says why there are none."""
    try:
        opened = open_containers("bubblewrap", cache=str(folder / "cache"))
    except UnusableTask as error:
        pytest.skip(str(error))
    yield opened
    asyncio.run(opened.close())


@pytest.fixture
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


async def played(
    folder: Path, containers: Any, generation: ScriptedGeneration, rounds: int, status: int = 0
) -> Trace:
    """Play the episode; the harness plays so many rounds, and ends with this status."""
    task = HarborTask.create(TaskSettings(path=folder / "task", max_turns=30))
    task.sandbox = containers
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        script = f"{PROGRAM}/small_harness.py"
        command = ["python3", script, port, str(rounds), str(status)]
        program = str(folder / "program")
        return await harness_trace(
            task, generation, generation.chat, command=command, program=program
        )


@pytest.mark.parametrize("status", [0, 3])
async def test_a_harness_plays_in_its_box_and_reaches_the_endpoint_alone(
    folder: Path, containers: Any, chat: ChatFormat, status: int
) -> None:
    generation = ScriptedGeneration(chat, *ACTIONS)
    trace = await played(folder, containers, generation, rounds=9, status=status)
    assert trace.reward == 1.0  # of tests that say whether anything else was reached
    assert trace.success
    assert [turn.action_ids for turn in trace.turns] == [r.token_ids for r in generation.results]
    assert [turn.logprobs for turn in trace.turns] == [r.logprobs for r in generation.results]
    assert [trace.prompt_ids(at) for at in range(3)] == [r.prompt_ids for r in generation.requests]
    assert "hello" in str(trace.messages[-2])


async def test_a_harness_that_does_not_act_is_no_reward_of_0(
    folder: Path, containers: Any, chat: ChatFormat
) -> None:
    for rounds, status, said in ((0, 0, "exit code 0"), (0, 4, "exit code 4")):
        with pytest.raises(TaskFailure, match=rf"harness_silent.*{said}"):
            await played(folder, containers, ScriptedGeneration(chat), rounds, status)


async def test_a_generator_that_fails_is_the_failure_of_the_episode(
    folder: Path, containers: Any, chat: ChatFormat
) -> None:
    generation = ScriptedGeneration(chat, ACTIONS[0], ConnectionError("generator lost"))
    with pytest.raises(TaskCodeError, match="generator lost"):  # a generator's own errors differ
        await played(folder, containers, generation, rounds=9)

"""Claude Code, Codex and mini-swe-agent, unmodified, each in a box: `nox -s harnesses` runs it.

The policy is scripted: what each harness calls its shell, and how it ends, is all that it knows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from harbor_folders import written
from harness_episodes import harness_trace
from python_image import python_root, with_image
from scripted_generation import ScriptedGeneration
from service_tasks import service_task

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.plugins.harbor.harness_agent import RECIPES
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.task import TaskSettings

PROGRAMS = "COMPOSER_MESH_TEST_HARNESSES"
"""Names the folder of the harnesses from npm, and of their folder for mini-swe-agent."""
FOLDERS = {"claude-code": "", "codex": "", "mini-swe-agent": "mini"}
WORK = ("echo hello > word.txt", "cat word.txt")
SHELLS = {
    "claude-code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "mini-swe-agent": ("bash", "command"),
}
LAST = {
    "mini-swe-agent": call_text("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})
}
VARIABLES = {"claude-code": {"CLAUDE_CODE_SIMPLE": "1"}}
TOML = '[environment]\nworkdir = "/app"\ndocker_image = "rootfs:{}"\n'
TESTS = """#!/bin/sh
[ "$(cat /app/word.txt)" = hello ] && reward=1
echo "${reward:-0}" > /logs/verifier/reward.txt
"""
SHARE = 0.95
EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"

pytestmark = pytest.mark.skipif(
    PROGRAMS not in os.environ, reason=f"nox -s harnesses installs them and sets {PROGRAMS}"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter, with an image and a task."""
    folder = entered_folder()
    programs = Path(os.environ[PROGRAMS])
    found = [
        one
        for name, recipe in RECIPES.items()
        for one in (programs / FOLDERS[name]).glob(recipe.program)
    ]
    found += (programs / FOLDERS["mini-swe-agent"]).rglob("*.so")
    root = python_root(folder / "root", found)
    written(folder / "task", {"task.toml": TOML.format(root), "tests/test.sh": TESTS})
    with_image(EXAMPLES, folder / "examples", root)
    for transport in ("http", "sse"):
        written(folder / transport, service_task(root, transport))
    return folder


def script(harness: str) -> Sequence[str]:
    """Return what the policy says: two calls of the shell, and the end."""
    tool, argument = SHELLS[harness]
    return [*(call_text(tool, {argument: one}) for one in WORK), LAST.get(harness, "It is done.")]


async def played(
    task_folder: Path, containers: Any, generation: ScriptedGeneration, harness: str
) -> Trace:
    """Play the episode of a task by a harness."""
    task = HarborTask.create(TaskSettings(path=task_folder, max_turns=30))
    task.sandbox = containers
    return await harness_trace(
        task,
        generation,
        generation.chat,
        harness=harness,
        program=str(Path(os.environ[PROGRAMS]) / FOLDERS[harness]),
        environment=VARIABLES.get(harness, {}),
        timeout_s=120.0,
    )


@pytest.fixture
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@pytest.mark.parametrize("harness", list(RECIPES))
async def test_an_unmodified_harness_plays_and_its_tokens_train(
    folder: Path, containers: Any, chat: ChatFormat, harness: str
) -> None:
    generation = ScriptedGeneration(chat, *script(harness))
    trace = await played(folder / "task", containers, generation, harness)
    assert trace.reward == 1.0, trace.messages[-1]
    assert len(generation.results) == len(WORK) + 1
    trained = [
        turn.action_ids for one in trace.trajectories() for turn in one.turns if turn.trained
    ]
    sampled = [result.token_ids for result in generation.results]
    assert sum(map(len, trained)) >= SHARE * sum(map(len, sampled))
    assert all(ids in sampled for ids in trained)


@pytest.mark.parametrize("harness", ["claude-code", "codex"])
async def test_an_unmodified_harness_calls_a_server_of_its_task_by_its_own_client(
    folder: Path, containers: Any, chat: ChatFormat, harness: str
) -> None:
    tool, argument = SHELLS[harness]
    write = call_text(tool, {argument: "echo 12 > counter.txt"})
    calls = [call_text("mcp__counter__add", {"number": number}) for number in (7, 5)]
    generation = ScriptedGeneration(chat, *calls, write, "It is done.")
    trace = await played(folder / "examples" / "mcp-counter", containers, generation, harness)
    assert trace.reward == 1.0, trace.messages[-1]
    results = [str(one["content"]) for one in trace.messages if one["role"] == "tool"]
    assert [results[0].rstrip().endswith("7"), results[1].rstrip().endswith("12")] == [True, True]


@pytest.mark.parametrize(
    ("harness", "transport"), [("claude-code", "http"), ("claude-code", "sse"), ("codex", "http")]
)
async def test_an_unmodified_harness_calls_the_server_of_a_service_by_its_url(
    folder: Path, containers: Any, chat: ChatFormat, harness: str, transport: str
) -> None:
    tool, argument = SHELLS[harness]
    write = call_text(tool, {argument: "echo lantern harbor > words.txt"})
    calls = [call_text("mcp__words__next_word", {}), call_text("mcp__words__next_word", {})]
    generation = ScriptedGeneration(chat, *calls, write, "It is done.")
    trace = await played(folder / transport, containers, generation, harness)
    results = [str(one["content"]) for one in trace.messages if one["role"] == "tool"]
    assert ["lantern" in results[0], "harbor" in results[1]] == [True, True], results
    assert trace.reward == 1.0, trace.messages[-1]

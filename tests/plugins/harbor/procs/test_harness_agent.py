"""A harness program in a real box: its turns are captured, its work is tested, it reaches no more.

The harness is a script of the tests, so that no package is needed.
"""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_harness
from agent_templates import FAMILIES
from chat_templates import with_template
from fake_outside import PUBLIC, FakeOutside
from harbor_folders import bash, written
from harness_episodes import harness_trace
from python_image import python_root, with_image
from scripted_generation import ScriptedGeneration

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.plugins.harbor.harness import PROGRAM
from composer_mesh.plugins.harbor.machine import TaskFailure
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.errors import TaskCodeError
from composer_mesh.tasks.task import TaskSettings

EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"
ACTIONS = (bash("echo hello > word.txt"), bash("cat word.txt"), "done")
TESTS = """#!/bin/sh
cd /app
[ "$(cat word.txt)" = hello ] && [ "$(cat reached.txt)" = nothing ] && reward=1
echo "${reward:-0}" > /logs/verifier/reward.txt
"""
TOML = '[agent]\ntimeout_sec = 100\n[environment]\nworkdir = "/app"\ndocker_image = "rootfs:{}"\n'
LISTED = """[verifier]
network_mode = "no-network"
{}network_mode = "allowlist"
allowed_hosts = ["good.org"]
"""
FETCH = """python3 -c 'import urllib.request
print(urllib.request.urlopen("http://good.org/").read().decode())' > got.txt"""
GOT = """#!/bin/sh
[ "$(cat /app/got.txt)" = "from outside" ] && reward=1
echo "${reward:-0}" > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter, with an image, a task and the harness."""
    folder = entered_folder()
    root = python_root(folder / "root")
    written(folder / "task", {"task.toml": TOML.format(root), "tests/test.sh": TESTS})
    (folder / "program").mkdir()
    shutil.copy(small_harness.__file__, folder / "program")
    with_image(EXAMPLES, folder / "examples", root)
    listed = {"task.toml": LISTED.format(TOML.format(root)), "tests/test.sh": GOT}
    written(folder / "listed", listed)
    return folder


@pytest.fixture
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


async def played(
    folder: Path,
    containers: Any,
    generation: ScriptedGeneration,
    rounds: int,
    status: int = 0,
    name: str = "task",
    outside: FakeOutside | None = None,
) -> Trace:
    """Play a task; the harness plays so many rounds of a step, and ends with this status."""
    options = {} if outside is None else {"network": "task"}
    task = HarborTask.create(TaskSettings(path=folder / name, max_turns=30), **options)
    task.sandbox = containers
    if outside is not None:
        task.limits = replace(task.limits, outside=outside.as_outside)
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


def tool(server: str, name: str, **arguments: Any) -> str:
    return call_text(f"mcp__{server}__{name}", arguments)


SERVED = {
    "mcp-counter": (
        *(tool("counter", "add", number=7), tool("counter", "add", number=5)),
        *(bash("echo 12 > counter.txt"), "done"),
    ),
    "mcp-notes": (
        *(tool("notes", "read_note", note="key"), bash("echo lantern > key.txt"), "done"),
    ),
}


@pytest.mark.parametrize(("name", "said"), [("mcp-counter", "12"), ("mcp-notes", "lantern")])
async def test_a_harness_calls_the_servers_of_its_task_by_its_own_client(
    folder: Path, containers: Any, chat: ChatFormat, name: str, said: str
) -> None:
    generation = ScriptedGeneration(chat, *SERVED[name])
    trace = await played(folder, containers, generation, rounds=9, name=f"examples/{name}")
    assert trace.reward == 1.0
    results = [one["content"] for one in trace.messages if one["role"] == "tool"]
    assert results[-2] == said
    assert [turn.action_ids for turn in trace.turns] == [r.token_ids for r in generation.results]


STEPS = {
    "steps-build-up": [
        (bash("seq 5 > numbers.txt"), "done"),
        (bash("awk '{s += $1} END {print s}' numbers.txt > sum.txt"), "done"),
    ],
    "steps-gated": [
        (bash("printf '#!/bin/bash\necho $((2 * $1))\n' > double.sh; chmod +x double.sh"), "done"),
        (bash("while read n; do ./double.sh $n; done < inputs.txt > doubled.txt"), "done"),
    ],
    "steps-three": [
        (bash("mkdir -p book; echo $TOPIC > book/title.txt"), "done"),
        (bash("cp drafts/* book/"), "done"),
        (bash("ls book | sort > index; mv index book/index.txt"), "done"),
    ],
}
INSTRUCTIONS = {name: sorted((EXAMPLES / name).rglob("instruction.md")) for name in STEPS}


@pytest.mark.parametrize("name", STEPS)
async def test_each_step_starts_a_harness_anew_on_the_files_of_the_one_before(
    folder: Path, containers: Any, chat: ChatFormat, name: str
) -> None:
    steps = STEPS[name]
    generation = ScriptedGeneration(chat, *(action for step in steps for action in step))
    trace = await played(folder, containers, generation, rounds=9, name=f"examples/{name}")
    assert (trace.reward, trace.success) == (1.0, True)
    asked = [chat.tokenizer.decode(one.prompt_ids) for one in generation.requests]
    found = [[said.read_text().strip() in text for said in INSTRUCTIONS[name]] for text in asked]
    assert [sum(one) for one in found] == [1] * len(asked)  # no step is in another's conversation
    assert [one.index(True) for one in found[::2]] == [one.index(True) for one in found[1::2]]
    assert len({one.index(True) for one in found}) == len(steps)


async def test_a_step_below_its_reward_is_the_last_one_of_a_harness(
    folder: Path, containers: Any, chat: ChatFormat
) -> None:
    generation = ScriptedGeneration(chat, bash("true"), "done", "never")
    name = "examples/steps-gated"
    trace = await played(folder, containers, generation, rounds=9, name=name)
    assert (trace.reward, len(generation.requests)) == (0.0, 2)


async def test_a_harness_with_a_list_of_hosts_reaches_them_and_its_endpoint(
    folder: Path, containers: Any, chat: ChatFormat
) -> None:
    generation, outside = ScriptedGeneration(chat, bash(FETCH), "done"), FakeOutside()
    async with outside.serving():
        trace = await played(
            folder, containers, generation, rounds=9, name="listed", outside=outside
        )
    assert (trace.reward, outside.reached) == (1.0, [(PUBLIC, 80)])

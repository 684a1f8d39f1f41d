"""A harness plays on in its box when its rollout worker is killed: nothing is done twice.

A small harness of the tests always; Claude Code and Codex by `nox -s harnesses`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_harness
from agent_templates import FAMILIES
from chat_templates import with_template
from harbor_folders import bash, written
from killed_workers import Pools, started_pools
from python_image import python_root
from scripted_generator import ScriptedGenerator

from composer_mesh.actors.rollout_workers.agent_endpoint import STREAM_WAIT_S
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.plugins.harbor.harness import PROGRAM
from composer_mesh.plugins.harbor.harness_agent import RECIPES
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Trace

TURNS = 4
TOOL = 1
"""The turn in whose tool call a worker is killed."""
COMMANDS = [f"echo {number} >> log.txt; cat log.txt" for number in range(TURNS - 1)]
TESTS = f"""#!/bin/sh
[ "$(cat /app/log.txt)" = "$(seq 0 {TURNS - 2})" ] && reward=1
echo "${{reward:-0}}" > /logs/verifier/reward.txt
"""
TOML = '[agent]\ntimeout_sec = 3000\n[environment]\nworkdir = "/app"\ndocker_image = "rootfs:{}"\n'
SMALL = {"command": ["python3", f"{PROGRAM}/small_harness.py", "1", "9", "0"]}
PROGRAMS = "COMPOSER_MESH_TEST_HARNESSES"
"""Names the folder of the harnesses from npm."""
HARNESSES = {
    "claude-code": ("Bash", "command", {"CLAUDE_CODE_SIMPLE": "1"}),
    "codex": ("exec_command", "cmd", {}),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter, with an image and the harness."""
    folder = entered_folder()
    programs = Path(os.environ.get(PROGRAMS, folder / "none"))
    found = [one for name in HARNESSES for one in programs.glob(RECIPES[name].program)]
    python_root(folder / "root", found)
    (folder / "program").mkdir()
    shutil.copy(small_harness.__file__, folder / "program")
    return folder


def config_of(folder: Path, place: Path, max_lag: int, **options: Any) -> Config:
    task = {"task.toml": TOML.format(folder / "root"), "tests/test.sh": TESTS}
    written(place / "tasks" / "counted", task)
    sandbox = {"backend": "bubblewrap", "cache": str(folder / "cache"), "most": 4}
    return Config.model_validate(
        {
            "run": {"name": "resumed", "steps": 1},
            "data": {"task": "harbor", "path": str(place / "tasks")},
            "environment": {"max_turns": 20, "sandbox": {"kind": "containers", "options": sandbox}},
            "policy": {"max_context": 200_000},
            "trainer": {"microbatch_tokens": 200_000},
            "generator": {"max_new_tokens": 1000},
            "rollouts": {
                "workflow": "composer_mesh.plugins.harbor.harness_agent:HarnessAgent",
                "options": {"program": str(folder / "program"), **options},
            },
            "schedule": {"max_lag": max_lag, "group_size": 2, "prompts_per_step": 1},
        }
    )


async def played(
    pools: Pools, moment: str, turn: int, gate: Path, begun_s: float = 0.0
) -> tuple[Trace, list[str]]:
    """Play an episode whose worker is killed; return its trace, and the requests with seeds.

    The tool call of one turn ends only after that, when there is a `gate`.
    """
    playing = pools.start()
    await pools.until("sampled", f"{moment} train-000000-000-{turn:02d}")
    await asyncio.sleep(begun_s)
    await pools.kill_the_worker()
    await asyncio.to_thread(gate.touch)
    trace = await playing
    assert trace is not None
    assert (trace.reward, len(trace.turns)) == (1.0, TURNS), pools.events
    asked = [one for one in pools.lines("sampled") if one.startswith("asked")]
    assert [kind for kind, *_ in pools.events] == ["rollout_retried"]
    assert "resumed from turn" in pools.events[0][2]
    assert pools.rollouts.retries.figures()["rollouts/resumed"] == 1
    return trace, asked


@pytest.mark.parametrize(
    ("moment", "turn", "max_lag"),
    [*(("asked", turn, 1) for turn in range(TURNS)), ("asked", 2, 0), ("answered", TOOL, 1)],
)
async def test_a_harness_whose_worker_is_killed_plays_on(
    moment: str,
    turn: int,
    max_lag: int,
    folder: Path,
    containers: Any,
    tokenizer: Any,
    tmp_path: Path,
    host: MeshHost,
) -> None:
    with_template(tokenizer, FAMILIES["qwen"]).save_pretrained(tmp_path / "tokenizer")
    config = config_of(folder, tmp_path, max_lag, **SMALL)
    gate = folder / "program" / tmp_path.name
    commands = list(COMMANDS)
    commands[TOOL] = f"until [ -e {PROGRAM}/{gate.name} ]; do sleep 0.1; done; {COMMANDS[TOOL]}"
    texts = [*map(bash, commands), "done"]
    load = tmp_path, texts, turn if moment == "asked" else -1
    if moment == "asked":
        gate.touch()
    async with started_pools(tmp_path, host, config, ScriptedGenerator, *load) as pools:
        trace, asked = await played(pools, moment, turn, gate)
        assert len(asked) in (TURNS, TURNS + 1)
        assert len(set(asked)) == TURNS  # one that was lost has the same name and seed again
        assert await pools.start() == trace  # as it is undisturbed


@pytest.mark.skipif(
    PROGRAMS not in os.environ, reason=f"nox -s harnesses installs them and sets {PROGRAMS}"
)
@pytest.mark.parametrize("begun_s", [0.0, 2 * STREAM_WAIT_S])
@pytest.mark.parametrize("harness", list(HARNESSES))
async def test_an_unmodified_harness_whose_worker_is_killed_plays_on(
    begun_s: float,
    harness: str,
    folder: Path,
    containers: Any,
    tokenizer: Any,
    tmp_path: Path,
    host: MeshHost,
) -> None:
    """While a request waits for its answer, before and after its stream has begun."""
    with_template(tokenizer, FAMILIES["qwen"]).save_pretrained(tmp_path / "tokenizer")
    shell, argument, environment = HARNESSES[harness]
    texts = [*(call_text(shell, {argument: one}) for one in COMMANDS), "It is done."]
    options = {"harness": harness, "program": os.environ[PROGRAMS], "environment": environment}
    config = config_of(folder, tmp_path, 1, **options)
    async with started_pools(
        tmp_path, host, config, ScriptedGenerator, tmp_path, texts, 2
    ) as pools:
        _, asked = await played(pools, "asked", 2, tmp_path / "gate", begun_s)
        assert len(asked) == TURNS + 1

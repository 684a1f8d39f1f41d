"""Our server under OpenEnv's own package: its validator and its clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "unit" / "helpers"))

from served_tasks import served_beside

from composer_mesh.configs.schema import Config

PYTHON = os.environ.get("COMPOSER_MESH_OPENENV_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="nox -s openenv runs these")
DEADLINE_S = 240
PLAYS = """
import asyncio, json, sys
from openenv.core.generic_client import GenericEnvClient

async def main(url):
    said = {}
    async with GenericEnvClient(base_url=url) as env:
        first = await env.reset(split="heldout", index=3, episode_id="mine")
        said["reset"] = [first.observation["text"], first.reward, first.done]
        step = await env.step({"type": "call_tool", "tool_name": "add", "arguments": {"by": -1}})
        said["step"] = [step.metadata, step.reward, step.done]
        said["state"] = await env.state()
        last = await env.step({"message": "done"})
        said["last"] = [last.reward, last.done]
        try:
            await env.step({"message": "again"})
        except RuntimeError as error:
            said["after"] = str(error)
        try:
            await env.reset(index=4)
            await env.step({"type": "call_tool", "tool_name": "fail", "arguments": {}})
        except RuntimeError as error:
            said["fault"] = str(error)
        again = await env.reset(index=4)
        said["again"] = again.done
        listed = await env.step({"type": "list_tools"})
        said["tools"] = [tool["name"] for tool in listed.observation["tools"]]
    print(json.dumps(said))

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    table = {"run": {"name": "served", "steps": 1}, "data": {"task": "served_tasks:Count"}}
    with served_beside(tmp_path_factory.mktemp("served"), Config.model_validate(table)) as url:
        yield url


def ran(*words: str) -> str:
    done = subprocess.run(
        [PYTHON, "-I", *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_openenvs_own_validator_passes_our_server(url: str) -> None:
    said = ran("-m", "openenv.cli", "validate", "--url", url)
    assert "FAIL" not in said
    assert said.count("PASS") == 7, "six criteria and the verdict"


def test_openenvs_own_clients_play_our_server(url: str) -> None:
    said = json.loads(ran("-c", PLAYS, url).splitlines()[-1])
    assert said["reset"][0].startswith("Count.")
    assert said["reset"][1:] == [None, False]
    assert said["step"][0]["error_kind"] == "negative"
    assert said["step"][0]["hint_template_key"] == "negative"
    assert (said["state"]["episode_id"], said["state"]["step_count"]) == ("mine", 1)
    assert said["last"] == [0.0, True]
    assert "VALIDATION_ERROR" in said["after"]
    assert "EXECUTION_ERROR" in said["fault"]
    assert said["again"] is False
    assert said["tools"] == ["add", "stop", "fail", "hang", "answer"]

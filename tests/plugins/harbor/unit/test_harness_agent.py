"""Harnesses as agents: what is refused before a run, how they are started, what keeps them out."""

from __future__ import annotations

import json
import socket
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_containers import FakeContainers
from harbor_folders import made, written

from composer_mesh.plugins.harbor.harness import HOME, PROGRAM, Launch
from composer_mesh.plugins.harbor.harness_agent import HarnessAgent, codex_files
from composer_mesh.plugins.harbor.harness_mcp import with_servers
from composer_mesh.plugins.harbor.machine import Machine, TaskFailure
from composer_mesh.plugins.harbor.task_toml import McpServerTable
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.toolbox import ToolboxTask

PLACES = {
    "claude-code": "node_modules/@anthropic-ai/claude-code-linux-x64/claude",
    "codex": "node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    "mini-swe-agent": "minisweagent/run/mini.py",
}


@dataclass
class AnAgent:
    """An endpoint that is none."""

    base_url: str = "http://127.0.0.1:4321/e/TOKEN/v1"
    api_key: str = "KEY"
    answers: int = 0
    environ: dict[str, str] = field(default_factory=lambda: {"OPENAI_API_KEY": "KEY"})

    def trajectories(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not for this test")

    __aenter__ = __aexit__ = trajectories


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "set one of them"),
        ({"harness": "codex", "command": ["x"]}, "set one of them"),
        ({"harness": "aider"}, "'aider': use claude-code, codex, mini-swe-agent"),
        ({"harness": "codex"}, "install codex into a folder"),
        ({"harness": "codex", "program": "/nowhere"}, "no folder here"),
        ({"command": ["x"], "timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_options_that_start_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnusableTask, match=said):
        HarnessAgent(**options)


@pytest.mark.parametrize("name", list(PLACES))
def test_a_harness_is_found_in_its_folder_and_knows_its_endpoint(tmp_path: Path, name: str) -> None:
    place = tmp_path / PLACES[name]
    place.parent.mkdir(parents=True)
    place.touch()
    agent = HarnessAgent(name, program=str(tmp_path), arguments=["-v"], environment={"A": "b"})
    launch = agent.launch(AnAgent())
    assert (launch.port, launch.mounts) == (4321, {PROGRAM: tmp_path})
    assert "-v" in launch.argv
    assert launch.environment.items() >= {("A", "b"), ("OPENAI_API_KEY", "KEY")}
    assert HOME in launch.environment.values()
    if name == "codex":
        assert launch.argv[0] == f"{PROGRAM}/{PLACES[name]}"
        provider = tomllib.loads(launch.files["config.toml"])["model_providers"]["mesh"]
        assert provider["base_url"] == AnAgent.base_url


async def test_an_endpoint_that_is_away_is_a_failure_of_the_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    task = made(written(tmp_path / "task"))
    machine = Machine(FakeContainers(), task.folder_of({"name": "task"}), task.limits)
    await machine.start()
    with pytest.raises(TaskFailure, match=r"endpoint_unreachable.*on one host"):
        await Launch(["run"], port, 10.0).play(machine, lambda: port)
    await machine.close()


SERVERS = [McpServerTable(name="one", transport="stdio", command="run", args=["-x", 'a"b'])]


def test_each_harness_gets_the_servers_of_a_task_in_its_own_configuration() -> None:
    plain = Launch(["run"], 1, 10.0)
    given = with_servers(plain, "task", SERVERS)
    listed = {"one": {"type": "stdio", "command": "run", "args": ["-x", 'a"b']}}
    assert json.loads(given.files["mcp.json"]) == {"mcpServers": listed}
    assert given.environment == {"COMPOSER_MESH_MCP_CONFIG": f"{HOME}/mcp.json"}
    claude = with_servers(replace(plain, harness="claude-code"), "task", SERVERS)
    assert claude.argv[-4:] == [f"{HOME}/mcp.json", "--strict-mcp-config", *claude.argv[-2:]]
    assert claude.argv[-2:] == ["--allowedTools", "mcp__one"]
    files = codex_files(AnAgent.base_url)
    codex = with_servers(replace(plain, harness="codex", files=files), "task", SERVERS, ["A"])
    config = tomllib.loads(codex.files["config.toml"])
    assert config["mcp_servers"]["one"].items() >= {"command": "run", "env_vars": ["A"]}.items()
    assert config["mcp_servers"]["one"]["args"] == ["-x", 'a"b']
    assert config["model_provider"] == "mesh"


HTTP = McpServerTable(
    name="two", transport="http", url="http://web:1/mcp", headers={"Authorization": "${KEY}"}
)
SSE = McpServerTable(name="old", url="http://web:1/sse")


def test_a_harness_gets_the_urls_of_servers_and_codex_none_of_the_older_transport() -> None:
    plain = Launch(["run"], 1, 10.0)
    given = json.loads(with_servers(plain, "task", [HTTP, SSE]).files["mcp.json"])["mcpServers"]
    assert given["two"] == {"type": "http", "url": HTTP.url, "headers": HTTP.headers}
    assert given["old"] == {"type": "sse", "url": SSE.url, "headers": {}}
    codex = replace(plain, harness="codex", files=codex_files(AnAgent.base_url))
    config = tomllib.loads(with_servers(codex, "task", [HTTP]).files["config.toml"])
    table = config["mcp_servers"]["two"]
    assert (table["url"], table["http_headers"]) == (HTTP.url, HTTP.headers)
    with pytest.raises(UnusableTask, match="'old' with transport 'sse', and codex has stdio"):
        with_servers(codex, "task", [SSE])


def test_a_task_without_servers_changes_no_launch() -> None:
    launch = Launch(["run"], 1, 10.0, harness="mini-swe-agent")
    assert with_servers(launch, "task", []) is launch


def test_a_task_that_a_harness_cannot_play_is_refused_before_a_run(tmp_path: Path) -> None:
    servers = '[[environment.mcp_servers]]\nname = "s"\ntransport = "stdio"\ncommand = "s"\n'
    text = f'[environment]\ndocker_image = "python:3.11-slim"\n{servers}'
    task = made(written(tmp_path / "task", {"task.toml": text}))
    place = tmp_path / PLACES["mini-swe-agent"]
    place.parent.mkdir(parents=True)
    place.touch()
    agent = HarnessAgent("mini-swe-agent", program=str(tmp_path))
    with pytest.raises(UnusableTask, match="mini-swe-agent has no MCP: leave the task out"):
        agent.check_task(task)
    HarnessAgent(command=["run"]).check_task(task)
    with pytest.raises(UnusableTask, match="plays Harbor tasks, and task 'toolbox' is none"):
        agent.check_task(ToolboxTask.create())


async def test_servers_are_refused_to_a_harness_that_takes_none(tmp_path: Path) -> None:
    servers = '[[environment.mcp_servers]]\nname = "s"\ntransport = "stdio"\ncommand = "s"\n'
    text = f'[environment]\ndocker_image = "python:3.11-slim"\n{servers}'
    task = made(written(tmp_path / "task", {"task.toml": text}))
    episode = task.episode("train", 0)
    launch = Launch(["run"], 1, 10.0, harness="mini-swe-agent").row
    running = RunningEpisode(
        task, type(episode)("harbor", "train", 0, {**episode.payload, **launch})
    )
    with pytest.raises(UnusableTask, match="mini-swe-agent has no MCP"):
        await running.begin()
    await running.close()


def test_a_server_whose_name_no_harness_takes_is_refused() -> None:
    servers = [McpServerTable(name="a.b]", transport="stdio", command="run")]
    with pytest.raises(UnusableTask, match=r"'a\.b\]', which a harness cannot name"):
        with_servers(Launch(["run"], 1, 10.0), "task", servers)

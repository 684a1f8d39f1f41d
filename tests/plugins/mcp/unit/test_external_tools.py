"""Tools of MCP servers in tasks: added to the task's own, called through the session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.configs.environment import McpServer
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import dump_toml, resolve_config
from composer_mesh.configs.regular_files import parse_toml
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.task_resources import attach_servers, with_tools
from composer_mesh.plugins.mcp.servers import McpServers
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import ToolError, ToolServerLost, UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ExternalTool, external_tools

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
EXAMPLE = {"name": "example", "transport": "module", "module": "mcp_example_server:server"}


def server(name: str = "example", tool: str = "add", **keys: Any) -> dict[str, Any]:
    tools = [{"name": tool, "description": "Adds.", "parameters": SCHEMA}]
    return {**EXAMPLE, "name": name, "tools": tools, **keys}


def config(build_config: Any, *servers: dict[str, Any]) -> Config:
    made: Config = build_config(environment={"max_turns": 6, "mcp": servers})
    return made


class FakeServers:
    """Servers that answer with what they were asked, or raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ended = error, []
        self.keys: set[str] = set()

    async def call(self, key: str, tool: ExternalTool, arguments: Mapping[str, Any]) -> str:
        self.keys.add(key)
        if self.error is not None:
            raise self.error
        return f"{tool.server}.{tool.remote} {json.dumps(dict(arguments))}"

    def end(self, key: str) -> None:
        self.ended.append(key)


def test_a_server_s_schema_is_shown_without_the_titles_that_pydantic_writes() -> None:
    written = {
        "title": "addArguments",
        "type": "object",
        "properties": {
            "title": {"title": "Title", "type": "string", "default": {"title": "kept"}},
            "a": {"title": "A", "anyOf": [{"type": "integer"}, {"type": "number"}], "ge": 0},
        },
    }
    given = server(tools=[{"name": "add", "parameters": json.dumps(written)}])
    (found,) = external_tools([McpServer.model_validate(given)])
    assert found.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "title": {"type": "string", "default": {"title": "kept"}},
            "a": {"type": "number", "minimum": 0},
        },
    }


def episode_of(task: Task, servers: FakeServers | McpServers) -> RunningEpisode:
    task.tool_servers = servers
    return RunningEpisode(task, task.episode("train", 0), TaskCalls(limit_s=60.0))


async def test_tools_of_servers_are_beside_those_of_a_task_that_ships(build_config) -> None:
    task = make_task(config(build_config, server(prefix="far_")))
    names = [one["function"]["name"] for one in task.tools]
    assert names[-1] == "far_add"
    assert "calculator" in names
    servers = FakeServers()
    episode = episode_of(task, servers)
    await episode.begin()
    step = await episode.step(call_text("far_add", {"a": 3}))
    assert step.messages[0]["content"] == 'example.add {"a": 3}'
    assert step.error is None
    await episode.close()
    assert servers.ended == list(servers.keys)


async def test_a_failed_call_is_an_error_site_and_a_lost_server_ends_the_attempt(
    build_config,
) -> None:
    task = make_task(config(build_config, server()))
    episode = episode_of(task, FakeServers(ToolError("mcp_tool_error", "no such file")))
    await episode.begin()
    step = await episode.step(call_text("add", {}))
    assert step.error is not None
    assert step.error.error_kind == "mcp_tool_error"
    assert step.messages[0]["content"] == "error: no such file"
    lost = episode_of(task, FakeServers(ToolServerLost("example", "it is gone")))
    await lost.begin()
    with pytest.raises(ToolServerLost, match="it is gone"):
        await lost.step(call_text("add", {}))


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ([server(tool="calculator")], "task 'toolbox' both have a tool 'calculator': set prefix"),
        ([server(), server("other")], "'other' and the MCP server 'example' both have a tool"),
    ],
)
def test_two_tools_of_one_name_are_refused_with_a_repair(
    build_config, servers: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(UnusableTask, match=words):
        make_task(config(build_config, *servers))


def test_the_tools_that_were_found_survive_the_config_file(build_config) -> None:
    asked = with_tools(config(build_config, {**EXAMPLE, "allow": ["add", "flood"]}))
    names = [one.name for one in asked.environment.mcp[0].tools or ()]
    assert names == ["add", "flood"]
    again = resolve_config(parse_toml(dump_toml(asked)), [], "again")
    assert again == asked
    assert with_tools(again) is again
    assert make_task(again).tools == make_task(asked).tools


async def test_a_task_calls_a_real_server_through_its_session(build_config) -> None:
    made = config(build_config, server())
    task = make_task(made.model_copy())
    unpinned = made.environment.mcp[0].model_copy(update={"tools": None})
    environment = made.environment.model_copy(update={"mcp": (unpinned,)})
    servers = attach_servers(made.model_copy(update={"environment": environment}), task, {})
    assert servers is not None
    try:
        episode = episode_of(task, servers)
        await episode.begin()
        step = await episode.step(call_text("add", {"a": 3, "b": 4}))
        assert step.messages[0]["content"] == "7"
        await episode.close()
    finally:
        await servers.close()


def test_a_config_whose_tools_are_not_known_makes_no_task_and_starts_nothing(
    build_config, tmp_path: Path
) -> None:
    mark = tmp_path / "started"
    program = {"name": "p", "transport": "stdio", "command": "touch", "args": [str(mark)]}
    with pytest.raises(UnusableTask, match="tools of the MCP server 'p' are not known"):
        make_task(config(build_config, program))
    assert not mark.exists()


def test_a_missing_variable_is_refused_before_anything_starts(build_config) -> None:
    far = {"name": "far", "transport": "http", "url": "http://127.0.0.1:9/mcp"}
    made = config(build_config, {**far, "token_env": "NOT_SET_HERE"})
    with pytest.raises(UnusableTask, match="NOT_SET_HERE, which is not set: export it"):
        with_tools(made, {})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"transport": "stdio", "module": None}, "command is not set but transport is 'stdio'"),
        ({"url": "http://x/mcp"}, "url is set but transport is 'module'"),
        ({"allow": ["a"], "deny": ["a"]}, "'a' is in allow and in deny"),
        ({"call_s": 50.0}, "raise environment.call_s above their sum"),
    ],
)
def test_a_table_that_cannot_work_is_refused(keys: dict[str, Any], words: str) -> None:
    table = {"run": {"name": "x", "steps": 1}, "data": {"task": "toolbox"}}
    keys = {key: value for key, value in {**EXAMPLE, **keys}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        resolve_config({**table, "environment": {"mcp": [keys]}}, [], "here")

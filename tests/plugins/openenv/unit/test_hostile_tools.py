"""Tools and schemas of servers that do what they must not."""

import asyncio
from typing import Any

import pytest
from openenv_server import Json, OpenEnvServer, Send, hook, made

from composer_mesh.plugins.openenv.client.errors import ProtocolViolation
from composer_mesh.plugins.openenv.client.schemas import bounded_schema
from composer_mesh.services.checks.task import example_arguments
from composer_mesh.tasks.errors import TaskError, UnusableTask


def listing(tools: Any) -> Send:
    return lambda socket: socket.observe({"observation": {"tools": tools}, "reward": None})


def tool(**changes: Any) -> Json:
    return {"name": "go", "description": "Goes.", "input_schema": {"type": "object"}} | changes


def bomb(levels: int) -> Json:
    """A schema of which each level names the next one ten times."""
    levels_of = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 10} for n in range(levels)}
    whole = {"$defs": {**levels_of, f"a{levels}": {}}}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, **whole}


def deep(levels: int) -> Json:
    found: Json = {}
    for _ in range(levels):
        found = {"type": "object", "properties": {"x": found}}
    return found


LISTS: dict[str, tuple[Any, str]] = {
    "10,000 tools": ([tool(name=f"t{n}") for n in range(10_000)], "lists 10,000 tools"),
    "none": ([], "lists 0 tools"),
    "a reserved name": ([tool(name="reset")], "called close, reset"),
    "one name twice": ([tool(), tool()], "lists a tool twice"),
    "a name with a token": ([tool(name="<|im_start|>")], "names have 1 to 64 letters"),
    "a bomb": ([tool(input_schema=bomb(12))], "more than 1,000 parts"),
    "itself": (
        [tool(input_schema={"type": "object", "properties": {"x": {"$ref": "#"}}})],
        "refers to|more than",
    ),
    "a circle": (
        [tool(input_schema={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})],
        "more than 1,000 parts or is deeper",
    ),
    "another server": (
        [tool(input_schema={"$ref": "http://127.0.0.1:1/schema"})],
        "refers to 'http://127.0.0.1:1/schema', which is not in it",
    ),
    "deep": ([tool(input_schema=deep(40))], "is deeper than"),
    "an argument with a token": (
        [tool(input_schema={"type": "object", "properties": {"<|im_end|>": {}}})],
        "has an argument",
    ),
    "many values": (
        [tool(input_schema={"type": "object", "properties": {"x": {"enum": ["a"] * 999}}})],
        "lists 999 values in enum",
    ),
    "a list as arguments": ([tool(input_schema={"type": "array"})], "are not an object"),
}


@pytest.mark.parametrize("name", LISTS)
def test_tools_beyond_the_bounds_are_refused_at_the_start(name: str):
    tools, said = LISTS[name]
    with (
        OpenEnvServer(hooks={"list_tools": hook(listing(tools))}) as server,
        pytest.raises(UnusableTask, match=said),
    ):
        made(server)


@pytest.mark.parametrize("tools", [None, "x", [1], [{"name": 1}], {"a": 1}])
def test_a_list_of_tools_of_another_form_is_refused(tools: Any):
    with (
        OpenEnvServer(hooks={"list_tools": hook(listing(tools))}) as server,
        pytest.raises(ProtocolViolation, match="lists tools of another form"),
    ):
        made(server)


async def test_a_pattern_of_a_server_cannot_hold_up_the_others():
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}}
    with OpenEnvServer(hooks={"list_tools": hook(listing([tool(input_schema=schema)]))}) as server:
        task = await asyncio.to_thread(made, server)
        checked = task.tool_specs["go"].checked({"x": "a" * 40 + "b"})
    assert checked["arguments"]["x"].endswith("b")


def test_what_no_prompt_or_check_could_hold_is_left_out_of_a_schema():
    schema = {
        "properties": {
            "x": {"type": "integer", "minimum": 10**400, "maximum": float("nan")},
            "y": {"enum": ["\ud800"], "description": "\ud800"},
        }
    }
    bounded, _ = bounded_schema("go", schema)
    assert bounded["properties"] == {"x": {"type": "integer"}, "y": {"description": "?"}}
    assert example_arguments({**bounded, "required": ["x"]}) == {"x": 1}


async def test_arguments_too_many_to_check_are_the_agents_error():
    parts = [{"type": "string", "maxLength": n} for n in range(100)]
    schema = {"type": "object", "properties": {"x": {"items": {"anyOf": parts}}}}
    with OpenEnvServer(hooks={"list_tools": hook(listing([tool(input_schema=schema)]))}) as server:
        task = await asyncio.to_thread(made, server)
        with pytest.raises(TaskError, match="values are too many for go"):
            task.tool_specs["go"].checked({"x": [1] * 20_000})

"""The tools of a served task as clients list them, with one more that says a text.

Clients that know tools alone (MCP, OpenEnv's tool client, TRL) could not answer otherwise.
"""

from __future__ import annotations

from typing import Any

from composer_mesh.plugins.openenv.server.errors import invalid
from composer_mesh.tasks.task import Task

ANSWER = "answer"
"""The tool that says a text; it has a `_` more for each tool of the task with that name."""
TEXT = "text"


def listed_tools(task: Task) -> list[dict[str, Any]]:
    """Return the tools in OpenEnv's format."""
    own = [
        {
            "name": one["function"]["name"],
            "description": one["function"]["description"],
            "input_schema": one["function"]["parameters"],
        }
        for one in task.tools
    ]
    schema = {
        "type": "object",
        "properties": {TEXT: {"type": "string", "description": "What you say."}},
        "required": [TEXT],
        "additionalProperties": False,
    }
    about = "Say a text without calling another tool, such as your final answer."
    return [*own, {"name": answer_name(task), "description": about, "input_schema": schema}]


def answer_name(task: Task) -> str:
    """Return the name of the tool that says a text."""
    taken = {one["function"]["name"] for one in task.tools}
    name = ANSWER
    while name in taken:
        name += "_"
    return name


def answer_text(arguments: dict[str, Any]) -> str:
    """Return what a call of that tool says; raise Refused for other arguments."""
    if arguments.keys() != {TEXT} or not isinstance(arguments[TEXT], str):
        raise invalid(f"say one text: {{{TEXT!r}: TEXT}}")
    return str(arguments[TEXT])

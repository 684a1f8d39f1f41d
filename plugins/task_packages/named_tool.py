"""Tools that a package describes: arguments are checked here, then given to the session by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN
from composer_mesh.tasks.tool import ToolSpec


class NamedTool(ToolSpec):
    """A tool with a pydantic model of its arguments.

    The session's method `function` gets its name and the arguments as they were written, so that a
    whole number stays one where the model takes a float.
    """

    def __init__(
        self, name: str, description: str, arguments: type[BaseModel], function: Callable[..., Any]
    ) -> None:
        self.name, self.description, self.arguments = name, description, arguments
        self.function, self.is_method, self._reader = function, True, fail_fast(arguments)
        self.errors: dict[type[Exception], str] = {}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        super().checked(arguments)
        return {"name": self.name, "arguments": dict(arguments)}


def describe_tools(tools: Iterable[ToolSpec]) -> str:
    """Return what a prompt says of tools that only this episode has, and how they are called."""
    lines = "\n".join(json.dumps(one.schema["function"]) for one in tools)
    return (
        f"These functions can be called, one in each message:\n{lines}\n\nA call is written as\n"
        f'{OPEN}\n{{"name": "function", "arguments": {{"argument": "value"}}}}\n{CLOSE}'
    )

"""What tasks of other packages share: imports that say how to install them, and described tools.

A described tool's arguments are checked here, then given to the session by name.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.tool import ToolSpec


@dataclass(frozen=True)
class Requirement:
    """A package of tasks: `task` needs its import package `module`, installed by `install`."""

    task: str
    distribution: str
    module: str
    versions: tuple[str, ...]
    install: str

    def imported(self, submodule: str = "") -> ModuleType:
        """Import the package, or one of its modules; raise UnusableTask if it is not there."""
        self._check_version()
        name = f"{self.module}.{submodule}" if submodule else self.module
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise UnusableTask(
                f"task {self.task!r} cannot import {name} ({error}): run {self.install}"
            ) from error

    def _check_version(self) -> None:
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            raise UnusableTask(
                f"task {self.task!r} needs the package {self.distribution}, which is not "
                f"installed: run {self.install}"
            ) from None
        if found not in self.versions:
            raise UnusableTask(
                f"task {self.task!r} was verified with {self.distribution} "
                f"{', '.join(self.versions)}, but {found} is installed: run {self.install}"
            )


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

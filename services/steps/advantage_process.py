"""Calls a custom advantage function in a process of its own, which is ended if it takes too long.

The function is the user's, and may run for ever: a thread of the controller could not be ended.
What runs in the process is `advantage_program`.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from composer_mesh.losses.custom_function import CustomFunctionError
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.programs import AnsweringProgram, ProgramFailed

PROGRAM = "composer_mesh.services.steps.advantage_program"
LOAD_S = 300.0
"""Longest wait for the import of the function's module, torch included."""


class AdvantageRequests(Protocol):
    """Answers the requests that `advantage_program` describes."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]: ...


class AdvantageProcess:
    """Answers requests about a function in a process, which ends with this object.

    A request that takes longer than `limit_s` ends it, and is a `CustomFunctionError`.
    """

    def __init__(self, import_path: str, limit_s: float) -> None:
        self._path, self._limit_s = import_path, limit_s
        self._program = AnsweringProgram(python_module(PROGRAM), os.environ, shows_errors=True)
        weakref.finalize(self, self._program.close)
        self._loaded, self._one_at_a_time = False, threading.Lock()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Waits for it, at most `limit_s`, or `LOAD_S` for the first."""
        with self._one_at_a_time:
            limit_s = self._limit_s if self._loaded else max(LOAD_S, self._limit_s)
            try:
                line = self._program.ask(json.dumps(request).encode(), limit_s)
            except ProgramFailed as error:
                raise CustomFunctionError(
                    self._path,
                    "",
                    f"it did not return within {limit_s:g} s, or its process ended "
                    f"({error.said}): look for a loop without end in it, or raise "
                    "supervision.custom_function_s",
                ) from None
            self._loaded = True
        found: dict[str, Any] = json.loads(line)
        return found

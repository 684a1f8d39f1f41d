"""Calls of BFCL's functions on instances that belong to one session.

A function is found by its name among those that the documents of the session's classes name. Gold
calls are Python expressions as text: they are parsed, and only literals are taken from them.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from composer_mesh.plugins.task_packages.bfcl.source import Source
from composer_mesh.tasks.errors import UnusableTask

MOST_FILES = 10_000
"""Files and folders of a session's file system, as they are walked."""

WITHOUT_STATE = frozenset({"MathAPI"})
_precision = threading.Lock()
"""MathAPI sets a precision for the whole process."""


class TooManyFiles(Exception):
    """The file system of a session has grown too large, or contains itself."""


class Instances:
    """The instances of one session, and the calls made on them."""

    def __init__(self, source: Source, row: Mapping[str, Any]) -> None:
        long_context = "long_context" in row["id"]
        self._instances: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        self._math: set[str] = set()
        for name in row["involved_classes"]:
            instance = self._instances[name] = source.api(name)()
            if name not in WITHOUT_STATE:
                scenario = deepcopy(row["initial_config"].get(name, {}))
                instance._load_scenario(scenario, long_context=long_context)
            for document in source.documents(name):
                self._methods[document["name"]] = getattr(instance, document["name"])
            if name in WITHOUT_STATE:
                self._math |= {document["name"] for document in source.documents(name)}

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
        """Call a function; return its result as text, and the error that it tells, if any."""
        try:
            with _precision if name in self._math else contextlib.nullcontext():
                result = self._methods[name](**arguments)
            text = _text(result)
        except Exception as error:  # noqa: BLE001  functions of the package raise for wrong calls
            return f"Error during execution: {error}", str(error)
        if name in ("cp", "mv"):
            _check_files(self._instances["GorillaFileSystem"].root)
        told = result.get("error") if isinstance(result, dict) else None
        return text, str(told) if told else None

    def bound(self, call: str) -> tuple[str, dict[str, Any]]:
        """Return the name and the named arguments of a gold call; raise UnusableTask for others."""
        name, positional, named = parsed_call(call)
        if name not in self._methods:
            raise UnusableTask(f"bfcl's gold call {call[:80]!r} names no function of its row")
        if not positional:
            return name, named
        names = list(inspect.signature(self._methods[name]).parameters)
        return name, {**dict(zip(names, positional, strict=False)), **named}

    def same_state(self, other: Instances) -> bool:
        """Whether all public attributes are equal to those of another session of the same row."""
        try:
            return all(
                _public(one) == _public(other._instances[name])
                for name, one in self._instances.items()
            )
        except RecursionError:  # a folder that contains itself equals none
            return False


def parsed_call(call: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse a call such as f('a', b=1) without evaluating it; raise UnusableTask for another."""
    try:
        found = ast.parse(call, mode="eval").body
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name):
            named = {str(one.arg): ast.literal_eval(one.value) for one in found.keywords}
            return found.func.id, [ast.literal_eval(one) for one in found.args], named
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    raise UnusableTask(f"bfcl's gold call {call[:80]!r} is no call with literal arguments")


def contains(results: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether all wanted results are among the results, as often, in any order."""
    return not Counter(wanted) - Counter(results)


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result) if isinstance(result, dict) else str(result)
    except (TypeError, ValueError):
        return str(result)


def _public(instance: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(instance).items() if not key.startswith("_")}


def _check_files(root: Any) -> None:
    """Raise TooManyFiles if a walk would not end soon."""
    left, found = [root], 0
    while left:
        found += 1
        if found > MOST_FILES:
            raise TooManyFiles
        left += getattr(left.pop(), "contents", {}).values()

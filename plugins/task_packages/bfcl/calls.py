"""BFCL's rows, its functions as tools, and their calls on instances that belong to one session.

Rows, documents and classes come from the package bfcl-eval. Rows are data. A class is taken by its
name from the list below, and nothing else of the package is imported, least of all its executor,
which evaluates text. A function is found by its name among those that the documents of the
session's classes name. Gold calls are Python expressions as text: they are parsed, and only
literals are taken from them.

An argument is what the document says, within bounds that keep each call short: text and lists have
a length, numbers a size, and a few arguments whose cost grows with them a smaller one.
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
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.plugins.task_packages.requirement import NamedTool, Requirement
from composer_mesh.tasks.errors import UnusableTask

BFCL = Requirement(
    "bfcl",
    "bfcl_eval",
    "bfcl_eval",
    ("2026.3.23",),
    "pip install 'composer-mesh[bfcl]' && pip install --no-deps bfcl-eval==2026.3.23",
)
CODE = "eval_checker.multi_turn_eval.func_source_code"
FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Modules of the classes, which are those of their documents too."""

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
LONGEST = 1 << 26


class PackageSource:
    """Rows by category, the documents of a class's functions, and the class, of bfcl-eval."""

    def rows(self, category: str) -> list[dict[str, Any]]:
        """Return the conversations of a category."""
        return self.single_turns(f"multi_turn_{category}")

    def gold(self, category: str) -> dict[str, list[list[str]]]:
        """Return the gold calls of each turn, as text, by the row's id."""
        return self.answers(f"multi_turn_{category}")

    def single_turns(self, category: str) -> list[dict[str, Any]]:
        """Return the rows of a category of single turns."""
        return _lines(self._data / f"BFCL_v4_{category}.json")

    def answers(self, category: str) -> dict[str, list[Any]]:
        """Return the right calls, each with its possible values, by the row's id."""
        lines = _lines(self._data / "possible_answer" / f"BFCL_v4_{category}.json")
        return {line["id"]: line["ground_truth"] for line in lines}

    def documents(self, api: str) -> list[dict[str, Any]]:
        """Return the documents of a class's functions."""
        return _lines(self._data / "multi_turn_func_doc" / f"{_file(api)}.json")

    def api(self, name: str) -> type[Any]:
        """Return a class by its name in a row."""
        found: type[Any] = getattr(BFCL.imported(f"{CODE}.{_file(name)}"), name)
        return found

    @cached_property
    def _data(self) -> Path:
        return Path(str(BFCL.imported().__file__)).parent / "data"


def _file(api: str) -> str:
    if api not in FILES:
        raise UnusableTask(
            f"a row of bfcl names the class {api[:40]!r}, which is none of {', '.join(FILES)}: "
            f"run {BFCL.install}"
        )
    return FILES[api]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = read_regular(path, LONGEST).decode()
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UnusableTask(f"{path} cannot be read ({error}): {BFCL.install}") from error


LONGEST_TEXT = 10_000
LONGEST_LIST = 200
LARGEST = 10**12
COSTLY = 1_000
"""Bound of exponents and precisions."""
CostlyNumber = Annotated[float, Field(ge=-COSTLY, le=COSTLY, allow_inf_nan=False)]

COSTLY_ARGUMENTS = {
    ("power", "exponent"),
    ("logarithm", "precision"),
    ("square_root", "precision"),
    ("round_number", "decimal_places"),
}
TEXT_TOO = {("close_ticket", "ticket_id")}
"""Whole numbers that gold calls give as text."""

STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


def function_tool(document: Mapping[str, Any], function: Callable[..., Any]) -> NamedTool:
    """Return a document's function as a tool; `function` is the session's method that calls it."""
    name = str(document["name"])
    arguments = _model(name, document["parameters"])
    return NamedTool(name, str(document["description"]), arguments, function)


def _model(name: str, parameters: Mapping[str, Any]) -> type[BaseModel]:
    required = set(parameters.get("required", ()))
    fields: dict[str, Any] = {}
    for key, one in parameters.get("properties", {}).items():
        default = ... if key in required else one.get("default")
        note = Field(default, description=one.get("description"))
        kind = CostlyNumber if (name, key) in COSTLY_ARGUMENTS else _type(name, key, one)
        fields[key] = (kind, note)
    model: type[BaseModel] = create_model(f"{name}_arguments", __config__=STRICT, **fields)
    return model


def _type(name: str, key: str, one: Mapping[str, Any]) -> Any:
    kind = one.get("type")
    if kind == "array":
        items: Any = _type(name, key, one.get("items", {}))
        return Annotated[list.__class_getitem__(items), Field(max_length=LONGEST_LIST)]
    if kind == "dict":
        return _model(f"{name}_{key}", one) if one.get("properties") else dict[str, Any]
    types: dict[Any, Any] = {
        "string": Annotated[str, Field(max_length=LONGEST_TEXT)],
        "integer": Annotated[int, Field(ge=-LARGEST, le=LARGEST)],
        "float": Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)],
        "boolean": bool,
    }
    if (name, key) in TEXT_TOO:
        return types["integer"] | types["string"]
    if kind not in types:
        raise UnusableTask(f"argument {key!r} of bfcl's {name!r} has the unknown type {kind!r}")
    return types[kind]


MOST_FILES = 10_000
"""Files and folders of a session's file system, as they are walked."""

WITHOUT_STATE = frozenset({"MathAPI"})
_precision = threading.Lock()
"""MathAPI sets a precision for the whole process."""


class TooManyFiles(Exception):
    """The file system of a session has grown too large, or contains itself."""


class Instances:
    """The instances of one session, and the calls made on them."""

    def __init__(self, source: PackageSource, row: Mapping[str, Any]) -> None:
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
        reported = result.get("error") if isinstance(result, dict) else None
        return text, str(reported) if reported else None

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
    raise UnusableTask(f"bfcl's gold call {call[:80]!r} is not a call with literal arguments")


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

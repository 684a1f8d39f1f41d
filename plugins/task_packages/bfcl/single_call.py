"""Single calls of the Berkeley Function Calling Leaderboard: one question, one right call.

The rows of `simple_python` and `multiple` are split once, by the name of the right function: for
supervised fine-tuning, for RL, and held out. They repeat functions and stories, so that success on
the last part is no score of the leaderboard.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, cast, get_args

from composer_mesh.plugins.task_packages.bfcl.calls import PackageSource
from composer_mesh.rollouts.tool_calls import CLOSE, OPEN, call_text
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ToolSpec

CATEGORIES = ("simple_python", "multiple")
Part = Literal["sft", "rl", "both"]
PARTS: dict[str, range] = {"sft": range(55), "rl": range(55, 78), "heldout": range(78, 100)}
"""Hundredths of the names of functions that each part has."""

RULES = (
    "You are a function calling assistant. The functions that you may call, as JSON schemas, are "
    "between <tools> and </tools>."
)
FORM = (
    "Answer with one call, written as\n"
    f'{OPEN}\n{{"name": "function", "arguments": {{"argument": "value"}}}}\n{CLOSE}'
)
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The documents' names of types that JSON Schema has other names for."""

IGNORED = re.compile(r"[ ,./\-_*^]")
"""What texts may differ in, besides case and kinds of quotation marks: the leaderboard's rule."""


class DocumentedFunction(ToolSpec):
    """A function that is known by its document alone; its arguments are compared, not checked."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.name, self.description = str(document["name"]), str(document["description"])
        self.document = document["parameters"]
        self.function, self.is_method, self.errors = SingleCallSession.call, True, {}

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The function in the format of OpenAI's `tools` parameter."""
        function = {"name": self.name, "description": self.description}
        return {
            "type": "function",
            "function": {**function, "parameters": _json_schema(self.document)},
        }

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"name": self.name, "arguments": dict(arguments)}


class SingleCallSession(Session):
    """One question; the first action ends the episode."""

    task: BfclSingleCall
    solved = False

    @property
    def own_tools(self) -> Mapping[str, ToolSpec]:
        """The functions of the row."""
        return self.task.functions(self.row["id"])

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Compare a call with the right one; raise ToolError for the first difference."""
        self.end()
        wanted, answers = self.task.answers[self.row["id"]]
        if name != wanted:
            raise ToolError("wrong_function", f"{name} is not the function", {"wanted": wanted})
        function = cast(DocumentedFunction, self.own_tools[name])
        if found := difference(arguments, answers, function.document):
            kind, argument = found
            note = function.document["properties"].get(argument, {}).get("description", "")
            facts = {"tool": name, "argument": argument, "note": note}
            facts["arguments"] = ", ".join(function.document["properties"])
            raise ToolError(kind, f"{kind.replace('_', ' ')}: {argument}", facts)
        self.solved = True
        return "right"

    def reply(self, _text: str) -> Reply:
        return Reply(error=ToolError("no_call", "the question needs a call", {}))


class BfclSingleCall(Task):
    """One function call to a question. `part` is what is trained on: "sft", "rl" or "both"."""

    name = "bfcl_single_call"
    session_class = SingleCallSession
    hint_templates: ClassVar[Mapping[str, str]] = {
        "no_call": "The question needs one function call, between the tags that the rules name.",
        "wrong_function": "The function to call is {wanted}.",
        "wrong_value": "The value of {argument} is not what the question says ({note}).",
    }

    def __init__(self, part: Part = "rl") -> None:
        if part not in get_args(Part):
            raise UnusableTask(
                f'options.part is {str(part)[:40]!r}: write "sft", "rl" or "both"; other rows are '
                "held out"
            )
        self._part = part

    @cached_property
    def source(self) -> PackageSource:
        """Where rows and answers come from."""
        return PackageSource()

    def load(self) -> None:
        self._documents: dict[str, list[dict[str, Any]]] = {}
        self.answers: dict[str, tuple[str, dict[str, list[Any]]]] = {}
        rows: dict[str, list[Row]] = {name: [] for name in PARTS}
        for category in CATEGORIES:
            answers = self.source.answers(category)
            for one in self.source.single_turns(category):
                ((name, arguments),) = answers[one["id"]][0].items()
                self._documents[one["id"]] = one["function"]
                self.answers[one["id"]] = name, arguments
                question = one["question"][0][0]["content"]
                rows[part_of(name)].append({"id": one["id"], "question": question})
        self._rows: dict[Split, list[Row]] = {
            "train": rows["sft"] + rows["rl"] if self._part == "both" else rows[self._part],
            "heldout": rows["heldout"],
        }
        known = [row for part in rows.values() for row in part]
        self._by_prompt = {_key(self.prompt(row)): row for row in known}

    def rows(self, split: Split) -> list[Row]:
        return self._rows[split]

    def functions(self, row: str) -> dict[str, ToolSpec]:
        """Return the functions of a row by name."""
        return {one["name"]: DocumentedFunction(one) for one in self._documents[row]}

    def prompt(self, row: Row) -> list[Message]:
        functions = self.functions(row["id"]).values()
        described = "\n".join(json.dumps(one.schema["function"]) for one in functions)
        system = f"{RULES}\n<tools>\n{described}\n</tools>\n{FORM}"
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": row["question"]},
        ]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """No tools that all episodes have: each one's prompt describes its own."""
        return []

    @reward
    def solved(self, transcript: Transcript) -> float:
        """1 if the call was right."""
        return float(cast(SingleCallSession, transcript.session).solved)

    def gold(self, row: Row) -> list[str]:
        name, answers = self.answers[row["id"]]
        function = cast(DocumentedFunction, self.functions(row["id"])[name])
        required = function.document.get("required", ())
        given = {key: one for key, one in answers.items() if one[0] != "" or key in required}
        return [call_text(name, {key: _first(one) for key, one in given.items()})]

    def expert(self, messages: list[Message]) -> str:
        return self.gold(self._by_prompt[_key(messages[:2])])[0]


def part_of(function: str) -> str:
    """Return the part that has the rows in which a function is right: sft, rl or heldout."""
    hundredth = int(hashlib.sha256(function.encode()).hexdigest(), 16) % 100
    return next(name for name, hundredths in PARTS.items() if hundredth in hundredths)


def difference(
    arguments: Mapping[str, Any], answers: Mapping[str, Sequence[Any]], document: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the kind and the argument of the first difference to the right call; None without.

    `answers` has the values that are right for each argument; an empty text among them says that it
    may be left out.
    """
    for name in arguments:
        if name not in answers:
            return "unknown_argument", name
    for name, right in answers.items():
        if name not in arguments:
            if "" not in right or name in document.get("required", ()):
                return "missing_argument", name
        elif not _fits(arguments[name], document["properties"][name]) or not any(
            _same(arguments[name], one) for one in right
        ):
            return "wrong_value", name
    return None


def _fits(value: Any, parameter: Mapping[str, Any]) -> bool:
    """Whether a value's type is the documented one; a whole number is a float too."""
    kind = parameter.get("type")
    if kind in ("array", "tuple"):
        return isinstance(value, list) and all(_fits(one, parameter["items"]) for one in value)
    if kind == "integer":
        return type(value) is int
    types: dict[Any, Any] = {"float": (int, float), "boolean": bool, "dict": dict}
    is_truth = isinstance(value, bool)
    return isinstance(value, types.get(kind, str)) and is_truth == (kind == "boolean")


def _same(value: Any, right: Any) -> bool:
    """Whether a value is a right one: texts by the leaderboard's rule, all else exactly."""
    if isinstance(value, str) and isinstance(right, str):
        return _plain(value) == _plain(right)
    if isinstance(value, list) and isinstance(right, list):
        return len(value) == len(right) and all(map(_same, value, right))
    if isinstance(value, dict) and isinstance(right, dict):
        missing = (one for key, one in right.items() if key not in value)
        return all("" in one for one in missing) and all(
            key in right and any(_same(one, allowed) for allowed in right[key])
            for key, one in value.items()
        )
    return isinstance(value, bool) == isinstance(right, bool) and bool(value == right)


def _plain(text: str) -> str:
    return IGNORED.sub("", text).lower().replace("'", '"')


def _first(answers: Any) -> Any:
    """Return the first right value; those of an object are lists of right values again."""
    found = next((one for one in answers if one != ""), "")
    if isinstance(found, dict):
        return {key: _first(one) for key, one in found.items() if one[0] != ""}
    if isinstance(found, list):
        return [_first([one]) for one in found]
    return found


def _json_schema(document: Any) -> Any:
    """Return a document's parameters as JSON Schema."""
    if isinstance(document, list):
        return [_json_schema(one) for one in document]
    if not isinstance(document, dict):
        return document
    return {
        key: JSON_TYPES.get(one, one)
        if key == "type" and isinstance(one, str)
        else _json_schema(one)
        for key, one in document.items()
    }


def _key(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(str(one["content"]) for one in messages)

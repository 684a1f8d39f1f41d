"""A task: a family of episodes that agents are trained and measured on.

    class Sums(Task):
        def generate(self, rng):
            a, b = rng.randint(1, 9), rng.randint(1, 9)
            return {"question": f"What is {a} plus {b}?", "answer": str(a + b)}

        def prompt(self, row):
            return row["question"]

        @reward
        def correct(self, transcript):
            return float(transcript.answer.strip() == transcript.row["answer"])

Rows come from `generate`, or from a file by `rows`. Training and held-out episodes never share one.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from composer_mesh.rollouts.hints import hint_templates
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.judges import Judge, Judges
from composer_mesh.tasks.reward import GROUP_MARK, TURN_MARK, RewardFunction, Transcript, rewards_of
from composer_mesh.tasks.rows import Row, held_out, read_rows, row_identity
from composer_mesh.tasks.sandbox import Sandbox
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.tool import ExternalTool, ToolServers, ToolSpec, tools_of, with_external

HELDOUT_SHARE = 0.25
"""Share of generated rows that are held out."""

MOST_DRAWS = 10_000


@dataclass(frozen=True)
class TaskSettings:
    """What a run's config says to its task.

    `seed` is the run's. An episode has `max_turns` actions of at most `calls_per_turn` calls;
    each failed call costs `tool_error_penalty`. `path` is the file of the rows, or the id of a
    dataset, if there is one, of which each `heldout_every`-th is held out. `hint_templates` are
    those in the config. A call of the task's code may take `call_s` seconds. `judges` are the
    names of the config's judges, which are queried at most `judge_answers` times for one answer;
    with `leave_out_spent` a reward is left out whose judge may not be queried any more.
    `external_tools` are the tools of its MCP servers.
    """

    seed: int = 0
    max_turns: int = 6
    calls_per_turn: int = 1
    tool_error_penalty: float = 0.0
    path: Path | str | None = None
    heldout_every: int = 5
    hint_templates: Mapping[str, str] = field(default_factory=dict)
    call_s: float = 60.0
    judges: tuple[str, ...] | None = None
    judge_answers: int = 3
    leave_out_spent: bool = False
    external_tools: tuple[ExternalTool, ...] = ()


class Task:
    """A family of episodes. Subclass it, and name the subclass in `data.task`.

    Keyword arguments of the subclass are set by `data.options`. Optional parts: `verified_answer`
    lets hints be checked for leaks; `expert` and `corrupted` allow warm starts and builtin
    teachers; `gold` lets the task itself be checked.
    """

    name: ClassVar[str] = ""
    """Name of the task in traces and metrics; the class's own if it is empty."""

    session_class: ClassVar[type[Session]] = Session
    """Class of the task's sessions, with their tools."""

    success_at: ClassVar[float] = 1.0
    """Reward from which on an episode counts as a success."""

    hint_templates: ClassVar[Mapping[str, str]] = {}
    """Hints by error kind or template key, with fields in braces that the errors fill."""

    settings: TaskSettings = TaskSettings()
    """What the run's config says; set before `load` is called."""

    judges: Judges | None = None
    """Who asks judges for the task's rewards; set by whatever plays its episodes."""

    tool_servers: ToolServers | None = None
    """What calls the tools of MCP servers; None where no episode is played."""

    needs_sandbox: ClassVar[bool] = False
    """Whether the task runs code of agents, so that whoever plays it hands a sandbox in."""

    reads_folder: ClassVar[bool] = False
    """Whether `data.path` is a folder of files, or a dataset of such, instead of rows."""

    sandbox: Sandbox | None = None
    """Where the task runs code of agents; None where no episode is played, or none is needed."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__dict__.get("name"):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def create(cls, settings: TaskSettings | None = None, **options: Any) -> Self:
        """Make and load a task; its own errors propagate."""
        task = cls(**options)
        task.settings = settings or TaskSettings()
        task.load()
        return task

    def judge(self, name: str) -> Judge:
        """Return the judge of a name under [[judges.models]]; raises UnusableTask without it."""
        known = self.settings.judges
        if known is not None and name not in known:
            raise UnusableTask(
                f"task {self.name!r} queries judge {name!r}, but the config has "
                f"{', '.join(known) or 'no judge'}: add it under [[judges.models]]"
            )
        if self.judges is None:
            raise UnusableTask(
                f"task {self.name!r} queries judge {name!r}, but no judges are available here: use "
                "a config with [[judges.models]], or set the task's `judges` in a test"
            )
        return Judge(name, self.judges, self.settings.judge_answers)

    def use_judges(self, judges: Judges) -> None:
        """Have all tasks of this one ask their judges there."""
        for part in self.parts:
            part.judges = judges

    # What a subclass defines.

    def load(self) -> None:
        """Load data; called once in each process that uses the task."""

    def rows(self, split: Split) -> Sequence[Row] | None:
        """Return the rows of a split; None if rows are generated.

        Without an override these are the rows of `data.path`, equal ones taken once.
        """
        return None if self._file_rows is None else self._file_rows[split]

    def generate(self, rng: random.Random) -> Row:
        """Return a new row, drawn with `rng` alone. Which split it belongs to is not up to it."""
        raise UnusableTask(
            f"task {self.name!r} has no rows: set data.path to a file of rows, or define rows() or "
            "generate()"
        )

    def identity(self, row: Row) -> str:
        """Return what makes a row a problem of its own: equal ones are in the same split.

        It has to be the same in every process.
        """
        return row_identity(row)

    def prompt(self, row: Row) -> str | list[Message]:
        """Return the first messages of an episode, or the text of a single one from the user."""
        raise UnusableTask(f"task {self.name!r} has no prompt: define prompt(self, row)")

    def verified_answer(self, episode: Episode) -> str | None:
        """Return the verified answer in the form in which a hint would leak it, or None."""
        return None

    def expert(self, messages: list[Message]) -> str:
        """Return the text of the correct action, derived from the messages alone."""
        raise UnusableTask(
            f"task {self.name!r} has no expert, which warm starts and builtin teachers need: "
            "define expert(self, messages), or set policy.warm_start and teachers to others"
        )

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """Return the text of a realistic wrong action for the same messages."""
        raise UnusableTask(
            f"task {self.name!r} makes no wrong actions, which imperfect experts need: define "
            "corrupted(self, messages, rng)"
        )

    def continued(self, messages: list[Message]) -> str:
        """Return the next action of one who notices only the mistakes that a tool reports.

        Demonstrations of imperfect agents continue with it. By default it is the expert's, which
        notices all.
        """
        return self.expert(messages)

    def unreported_error(self, messages: list[Message], text: str) -> ToolError | None:
        """Return the error of an action that no tool reports; None if there is none.

        Warm starts learn from it which hint belongs to such a mistake.
        """
        return None

    def gold(self, row: Row) -> Sequence[str]:
        """Return the texts of the actions that solve an episode, in order, from its row."""
        raise UnusableTask(
            f"task {self.name!r} states no gold actions: define gold(self, row), or evaluate a "
            "model in place of --policy gold"
        )

    def success(self, transcript: Transcript, reward: float) -> bool:
        """Whether an episode succeeded; `reward` is its sum before penalties."""
        return reward >= self.success_at

    def screened(self, transcript: Transcript) -> bool:
        """Whether a finished rollout is stored and measured, and nothing of it is trained."""
        return False

    async def check_sandbox(self, sandbox: Sandbox) -> None:
        """Raise UnusableTask where this task cannot be played in a sandbox; may run commands."""

    def remarks(self) -> Sequence[str]:
        """Return lines that `composer-mesh check` adds, after a dry episode."""
        return ()

    # What the service calls.

    @cached_property
    def own_tools(self) -> dict[str, ToolSpec]:
        """The tools of the task's sessions by name."""
        return tools_of(self.session_class, self.session_class.tools)

    @cached_property
    def tool_specs(self) -> dict[str, ToolSpec | ExternalTool]:
        """All tools by name: the task's own, then those of MCP servers."""
        return self.with_server_tools(self.own_tools)

    def with_server_tools(self, own: Mapping[str, ToolSpec]) -> dict[str, ToolSpec | ExternalTool]:
        """Return tools with those of MCP servers; raises UnusableTask where two have one name."""
        return with_external(self.name, own, self.settings.external_tools)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools in the format of OpenAI's `tools` parameter."""
        return [spec.schema for spec in self.tool_specs.values()]

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The reward functions, in order of definition."""
        return rewards_of(self)

    @cached_property
    def group_rewards(self) -> list[RewardFunction]:
        """The reward functions of groups, in order of definition."""
        own = {one.name for one in self.rewards}
        found = rewards_of(self, GROUP_MARK)
        for one in found:
            if one.name in own:
                raise UnusableTask(
                    f"task {self.name!r} has a reward and a group reward named {one.name!r}: give "
                    "one of them another name"
                )
        return found

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights of all rewards by name."""
        return {one.name: one.weight for one in (*self.rewards, *self.group_rewards)}

    @cached_property
    def turn_rewards(self) -> list[RewardFunction]:
        """The reward functions of turns, in order of definition."""
        return rewards_of(self, TURN_MARK)

    @cached_property
    def hint_keys(self) -> frozenset[str]:
        """Keys of all hint templates that its errors may name."""
        return frozenset(hint_templates(self.hint_templates, self.settings.hint_templates))

    @property
    def states_answers(self) -> bool:
        """Whether hints can be checked for the verified answer."""
        return type(self).verified_answer is not Task.verified_answer

    @property
    def has_expert(self) -> bool:
        """Whether the task has an expert."""
        return type(self).expert is not Task.expert

    @property
    def makes_mistakes(self) -> bool:
        """Whether the task has wrong actions for imperfect experts."""
        return type(self).corrupted is not Task.corrupted

    @property
    def demonstrates(self) -> bool:
        """Whether the task has an expert, or states gold actions."""
        return self.has_expert or type(self).gold is not Task.gold

    def of(self, name: str) -> Task:
        """Return the task of an episode: this one, or one of a mixture."""
        return self

    @property
    def parts(self) -> Sequence[Task]:
        """All tasks: this one, or those of a mixture."""
        return [self]

    def locate(self, index: int) -> tuple[str, int]:
        """Return the task of a training episode, and its index there."""
        return self.name, index

    def index_of(self, task: str, own: int) -> int:
        """Return the index of a task's `own`-th training episode."""
        return own

    def pick(self, split: Split, index: int) -> Episode:
        """Return an episode without its row; calls nothing that a subclass defines."""
        return Episode(self.name, split, index)

    def episode(self, split: Split, index: int) -> Episode:
        """Return an episode with its row; indices beyond the last row begin again with the first.

        Raises UnusableTask where the split has no row.
        """
        rows = self.rows(split)
        row = self._generated(split, index) if rows is None else self._row(rows, split, index)
        return Episode(self.name, split, index, row)

    def session(self, episode: Episode) -> Session:
        """Return a new session of an episode that has its row."""
        session = self.session_class()
        session.task, session.episode = self, episode
        return session

    @cached_property
    def _file_rows(self) -> dict[Split, list[Row]] | None:
        if self.settings.path is None:
            return None
        rows = read_rows(self.settings.path)
        return held_out(rows, self.settings.heldout_every, self.identity, self.settings.path)

    def _row(self, rows: Sequence[Row], split: Split, index: int) -> Row:
        if not rows:
            raise UnusableTask(f"task {self.name!r} has no {split} rows: give it some")
        return rows[index % len(rows)]

    def _generated(self, split: Split, index: int) -> Row:
        for attempt in range(MOST_DRAWS):
            rng = random.Random(f"{self.settings.seed}:{split}:{index}:{attempt}")
            row = self.generate(rng)
            try:
                found = split_of(self.identity(row))
            except UnusableTask as error:
                where = f"{split} episode {index} of task {self.name!r}"
                raise UnusableTask(f"{where}: {error}") from None
            if found == split:
                return row
        raise UnusableTask(
            f"task {self.name!r} generated no {split} row in {MOST_DRAWS:,} draws: let generate() "
            "draw from more problems"
        )


def split_of(identity: str) -> Split:
    """Return the split of a generated row, from a hash of its identity."""
    digest = hashlib.sha256(identity.encode()).digest()
    return "heldout" if digest[0] < HELDOUT_SHARE * 256 else "train"

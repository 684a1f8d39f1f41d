"""Makes the task that a config names: a registered one, or a user's by import path or file.

Several tasks as one: training episodes in the ratio of their weights, held-out ones in turn.

Selects the held-out episodes of an evaluation: each problem once, for independent trials.

A task with few problems repeats them by index; repeats add no information about a policy and would
make the confidence interval of its success rate too narrow.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from composer_mesh.configs import plugins
from composer_mesh.configs.data import MixedTask
from composer_mesh.configs.schema import Config
from composer_mesh.configs.user_code import NotImported, imported
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import TaskError, UnusableTask, code_of_task
from composer_mesh.tasks.rows import row_identity
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.task import Task, TaskSettings
from composer_mesh.tasks.tool import external_tools
from composer_mesh.tasks.workflow import Workflow


def heldout_indices(task: Task, count: int) -> list[int]:
    """Return the first `count` held-out episodes by index, without repeated problems."""
    first: dict[str, int] = {}
    for index in range(count):
        try:
            first.setdefault(row_identity(task.episode("heldout", index).payload), index)
        except UnusableTask as error:
            raise UnusableTask(f"heldout episode {index} of task {task.name!r}: {error}") from None
    return list(first.values())


def fewer_episodes(indices: Sequence[int], count: int) -> str:
    """Return a message if a task has fewer held-out problems than `count`; else an empty string."""
    if len(indices) == count:
        return ""
    return (
        f"eval.episodes is {count} but the data has {len(indices)} different held-out episodes: "
        "each of them is evaluated once"
    )


class TaskMixture(Task):
    """A mixture of tasks with different names.

    Episode i of a task in the mixture is its own i-th: none is left out and none repeated. Which
    task is next depends on the weights alone, so every process finds the same.
    """

    name = "mixture"

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float]) -> None:
        self._tasks = {task.name: task for task in tasks}
        if len(self._tasks) < len(tasks):
            names = [task.name for task in tasks]
            raise UnusableTask(
                f"data.mixture holds the tasks {', '.join(names)}: give each class its own name"
            )
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._order: list[tuple[str, int]] = []
        self._indices: dict[str, list[int]] = {name: [] for name in self._tasks}

    def of(self, name: str) -> Task:
        """Return the task of an episode."""
        return self._tasks[name]

    @property
    def parts(self) -> Sequence[Task]:
        return list(self._tasks.values())

    @property
    def hint_templates(self) -> Mapping[str, str]:  # type: ignore[override]
        """The hint templates of all tasks; of equal keys, those of the last task."""
        return {key: text for task in self.parts for key, text in task.hint_templates.items()}

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of all tasks, each name once."""
        found = {one["function"]["name"]: one for task in self.parts for one in task.tools}
        return list(found.values())

    @property
    def states_answers(self) -> bool:
        return all(task.states_answers for task in self.parts)

    @property
    def has_expert(self) -> bool:
        return all(task.has_expert for task in self.parts)

    @property
    def makes_mistakes(self) -> bool:
        return all(task.makes_mistakes for task in self.parts)

    @property
    def demonstrates(self) -> bool:
        return all(task.demonstrates for task in self.parts)

    def locate(self, index: int) -> tuple[str, int]:
        return self._place("train", index)

    def index_of(self, task: str, own: int) -> int:
        while len(self._indices[task]) <= own:
            self._append()
        return self._indices[task][own]

    def pick(self, split: Split, index: int) -> Episode:
        name, _ = self._place(split, index)
        return Episode(name, split, index)

    def episode(self, split: Split, index: int) -> Episode:
        name, own = self._place(split, index)
        return replace(self._tasks[name].episode(split, own), index=index)

    def session(self, episode: Episode) -> Session:
        return self._tasks[episode.task].session(episode)

    def verified_answer(self, episode: Episode) -> str | None:
        return self._tasks[episode.task].verified_answer(episode)

    def expert(self, messages: list[Message]) -> str:
        return self._reading(messages).expert(messages)

    def continued(self, messages: list[Message]) -> str:
        return self._reading(messages).continued(messages)

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return self._reading(messages).corrupted(messages, rng)

    def _place(self, split: Split, index: int) -> tuple[str, int]:
        """Return the task of an episode, and its index there."""
        if split == "heldout":
            names = list(self._tasks)
            return names[index % len(names)], index // len(names)
        while len(self._order) <= index:
            self._append()
        return self._order[index]

    def _append(self) -> None:
        """Give the next training episode to the task that is furthest behind its share."""
        taken = self._indices.values()
        behind = [
            share * (len(self._order) + 1) - len(indices)
            for share, indices in zip(self._shares, taken, strict=True)
        ]
        name = list(self._tasks)[behind.index(max(behind))]
        self._indices[name].append(len(self._order))
        self._order.append((name, len(self._indices[name]) - 1))

    def _reading(self, messages: list[Message]) -> Task:
        """Return the first task whose expert understands a conversation."""
        problems = []
        for task in self.parts:
            try:
                task.expert(messages)
            except ValueError as error:
                problems.append(f"{task.name}: {error}")
            else:
                return task
        raise ValueError(f"no task of the mixture has this conversation: {'; '.join(problems)}")


T = TypeVar("T")


def make_task(config: Config) -> Task:
    """Make and load the configured task.

    Raises UnusableTask where it cannot be imported, TaskCodeError where its own code raises, and
    whatever a task that ships says of bad data.
    """
    tasks = [_created(config, one) for one in config.data.tasks]
    if len(tasks) == 1:
        return tasks[0]
    mixture = TaskMixture(tasks, [one.weight for one in config.data.tasks])
    mixture.settings = tasks[0].settings
    return mixture


def task_class(name: str) -> type[Task]:
    """Import the class of a task: "toolbox", "my_package.my_task:MyTask" or "my_task.py:MyTask"."""
    return _subclass("data.task", plugins.find("tasks", name) or name, Task)


def source_of(name: str) -> Path | None:
    """Return the file that defines a task of a user's; None for those that ship.

    Raises ModuleNotFoundError where its package is not installed.
    """
    if name in plugins.own("tasks"):
        return None
    name = plugins.find("tasks", name) or name
    file, _, _ = name.rpartition(":" if ":" in name else ".")
    if file.endswith(".py"):
        return Path(file)
    spec = importlib.util.find_spec(file)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def make_workflow(config: Config) -> Workflow | None:
    """Make the configured workflow; None without one. Raises as `make_task`."""
    if config.rollouts.workflow is None:
        return None
    kind = _subclass("rollouts.workflow", config.rollouts.workflow, Workflow)
    return _made("rollouts", kind, config.rollouts.options)


def _created(config: Config, source: MixedTask) -> Task:
    task = _made("data", task_class(source.task), source.options)
    task.settings = TaskSettings(
        seed=config.run.seed,
        max_turns=config.environment.max_turns,
        calls_per_turn=config.environment.calls_per_turn,
        tool_error_penalty=config.environment.tool_error_penalty,
        path=source.path,
        heldout_every=source.heldout_every,
        hint_templates=config.sdpo.hints.templates,
        call_s=config.environment.call_s,
        judges=tuple(one.name for one in config.judges.models),
        judge_answers=config.judges.answers,
        leave_out_spent=config.judges.when_spent == "leave_out",
        external_tools=external_tools(config.environment.mcp),
    )
    with code_of_task(f"loading task {source.task!r}", TaskError, ValueError):
        task.load()
        _ = task.tools, task.rewards, task.turn_rewards, task.group_rewards
    return task


def _made(section: str, kind: type[T], options: Mapping[str, Any]) -> T:
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise UnusableTask(
            f"{section}.options are {dict(options)}, but {kind.__name__} takes "
            f"{inspect.signature(kind)} ({error}): change {section}.options"
        ) from None
    with code_of_task(f"making a {kind.__name__}", TaskError):
        return kind(**options)


def _subclass(key: str, path: str, base: type[T]) -> type[T]:
    try:
        with code_of_task(f"importing {path}", NotImported):
            found = imported(path)
    except NotImported as error:
        bare = key == "data.task" and path.isidentifier()
        known = f", or one of {plugins.known('tasks')}" if bare else ""
        raise UnusableTask(f"{key} is {path!r}, but {error}{known}") from None
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise UnusableTask(
            f"{key} is {path!r}, which is a {type(found).__name__} and no subclass of "
            f"composer_mesh.{base.__name__}: name one that is"
        )
    return found

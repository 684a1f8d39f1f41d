"""Several tasks as one: training episodes in the ratio of their weights, held-out ones in turn."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.session import Session
from composer_mesh.tasks.task import Task


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

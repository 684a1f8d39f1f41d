"""The section `[data]`: what the episodes are made from.

The section `[data.curriculum]`: training episodes by their measured success.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import MOST, Count, FreeTable, Positive, Section, Share
from composer_mesh.configs.hub import DataPath


class CurriculumConfig(Section):
    """Training episodes and tasks chosen by their success so far, towards a target band."""

    low: Share = 0.1
    """Lowest success of an episode's latest group with which it is preferred and played again."""

    high: Share = 0.9
    """Highest success of an episode's latest group with which it is preferred and played again."""

    explore: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the groups that always play a new episode; also the smallest factor of a task's
    weight in a mixture."""

    window: Count = 64
    """Number of a task's latest groups whose success moves its weight in a mixture."""

    def _problems(self) -> Iterator[str]:
        if self.low > self.high:
            yield (
                f"low is {self.low} but high is {self.high}, so no success is in the band: lower "
                "low to at most that"
            )

    def holds(self, successes: int, samples: int) -> bool:
        """Whether a success rate is in the band; that of no samples is not."""
        return samples > 0 and self.low <= successes / samples <= self.high

    def fit(self, success: float) -> float:
        """Return 1 in the band, and less towards 0 and 1 outside of it."""
        if success < self.low:
            return success / self.low
        return (1 - success) / (1 - self.high) if success > self.high else 1.0


TaskPath = Annotated[str, Field(min_length=1, max_length=1000)]
Every = Annotated[int, Field(ge=2, le=MOST)]
MOST_TASKS = 100
OWN_EPISODES = ("toolbox", "tool_chains", "home_devices")
"""Tasks that ship and draw their episodes from the seed."""


class MixedTask(Section):
    """One task of several that are trained together."""

    task: TaskPath
    """As `data.task`."""

    weight: Positive = 1.0
    """Share of the training episodes, relative to the other weights."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of your task's class."""

    path: DataPath | None = None
    """As `data.path`."""

    heldout_every: Every = 5
    """As `data.heldout_every`."""

    def _problems(self) -> Iterator[str]:
        yield from path_problems(self.task, self.path, self.options)


class DataConfig(Section):
    """Source of the episodes."""

    task: TaskPath | None = None
    """The task, by name or as a class. "toolbox": episodes made from the seed; "tool_chains",
    "home_devices": longer ones, with options.calls; "gsm8k": math word problems from a JSONL file;
    "openenv": an environment of an OpenEnv server, by options.url. Your own class is
    "my_package.my_task:MyTask" or "my_task.py:MyTask". A module is searched in run.import_paths
    too; a file is relative to the working directory."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of your task's class."""

    path: DataPath | None = None
    """File of the task's rows (.jsonl, .json, .parquet, or a folder that datasets.save_to_disk
    wrote), relative to the working directory. Or the id of a dataset on the hub, as "ORG/NAME",
    "ORG/NAME:CONFIG" or "ORG/NAME:CONFIG@REVISION". Its splits train, and test or validation, are
    used; a run pins the commit."""

    heldout_every: Every = 5
    """Every n-th different row of the file is held out, unless a column `split` decides it."""

    mixture: Annotated[tuple[MixedTask, ...], Field(strict=False, max_length=MOST_TASKS)] = ()
    """Several tasks in place of one: tables [[data.mixture]], each with a `task` and a `weight`."""

    curriculum: CurriculumConfig | None = None
    """Choice of training episodes by their measured success; by default they are taken in order."""

    def _problems(self) -> Iterator[str]:
        if self.mixture and (self.task is not None or self.path is not None or self.options):
            yield (
                "task, path or options are set together with mixture: give each table of "
                "[[data.mixture]] its own"
            )
        if not self.mixture and self.task is None:
            yield (
                'task is not set: set data.task, for example to "toolbox", or add tables '
                "[[data.mixture]]"
            )
        if self.task is not None:
            yield from path_problems(self.task, self.path, self.options)

    @property
    def tasks(self) -> tuple[MixedTask, ...]:
        """All tasks; a single one has weight 1."""
        if self.task is None:
            return self.mixture
        one = MixedTask(
            task=self.task, options=self.options, path=self.path, heldout_every=self.heldout_every
        )
        return (one,)


def path_problems(task: str, path: object, options: object) -> Iterator[str]:
    """Yield what is wrong with the file or the options of a task that ships."""
    if task == "gsm8k" and path is None:
        yield (
            "path is not set but task is 'gsm8k', which reads one JSONL file or dataset: "
            "set data.path, for example --set data.path=FILE.jsonl, or openai/gsm8k:main"
        )
    found = f"path is {str(path)!r}" if path is not None else ""
    if task == "toolbox" and options and not found:
        found = "options are set"
    if task in OWN_EPISODES and found:
        yield (
            f"{found} but task is {task!r}, which makes its own episodes: "
            f"remove {found.split()[0]} or name another task"
        )

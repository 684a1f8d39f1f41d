"""Training and held-out tasks of OpenEnv's Task API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from composer_mesh.plugins.openenv.client.options import OpenEnvOptions
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.rows import Row

UNCOUNTED = 2**31
"""Indices that are used of a split whose tasks are made and not counted."""


@dataclass(frozen=True)
class TaskSplit:
    """A split of the Task API: `kind` is "train", "validation" or "test"."""

    name: str
    kind: str


@dataclass(frozen=True)
class TaskRows(Sequence[Row]):
    """Tasks of a split, by index, made when they are asked for.

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


class Counting(Protocol):
    """Counts the tasks of a split."""

    def num_tasks(self, env: str, split: str) -> int | None: ...


def rows_of(
    options: OpenEnvOptions,
    env: str,
    listed: Sequence[TaskSplit],
    server: Counting,
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


def _counted(server: Counting, env: str, split: str) -> int:
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

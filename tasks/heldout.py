"""Selects the held-out episodes of an evaluation: each problem once, for independent trials.

A task with few problems repeats them by index; repeats add no information about a policy and would
make the confidence interval of its success rate too narrow.
"""

from collections.abc import Sequence

from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.rows import row_identity
from composer_mesh.tasks.task import Task


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

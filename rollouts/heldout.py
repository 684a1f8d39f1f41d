"""Which held-out episodes an evaluation plays: each problem once, so that trials are independent.

A task of few problems begins again at its first; a problem that comes again says nothing new about
a policy, and would only make the interval of its success narrower than it is.
"""

import json
from collections.abc import Sequence

from composer_mesh.rollouts.tasks import Episode, Task


def heldout_indices(task: Task, count: int) -> list[int]:
    """The first `count` held-out episodes by index, without those that repeat an earlier one."""
    first: dict[str, int] = {}
    for index in range(count):
        first.setdefault(_problem(task.episode("heldout", index)), index)
    return list(first.values())


def fewer_episodes(indices: Sequence[int], count: int) -> str:
    """What is said where a task has fewer held-out problems than were asked for; else nothing."""
    if len(indices) == count:
        return ""
    return (
        f"eval.episodes is {count} but the data has {len(indices)} different held-out episodes: "
        "each of them is evaluated once"
    )


def _problem(episode: Episode) -> str:
    return json.dumps(episode.payload, sort_keys=True, default=repr)

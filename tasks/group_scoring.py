"""Scores the samples of an episode together, by the group rewards of its task."""

import math
from collections.abc import Sequence

from composer_mesh.rollouts.group_rewards import FinishedRollout, GroupScore
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.calls import Calls
from composer_mesh.tasks.errors import JudgesSpent, UnusableTask
from composer_mesh.tasks.reward import RewardFunction, Transcript
from composer_mesh.tasks.task import Task


async def score_group(
    task: Task, episode: Episode, group: Sequence[FinishedRollout], calls: Calls
) -> GroupScore:
    """Return each group reward's values for the rollouts of an episode that has its row."""
    part = task.of(episode.task)
    transcripts = [
        Transcript(episode, one.messages, one.errors, "unknown", None, one.rewards) for one in group
    ]
    values, left_out = dict[str, list[float]](), list[str]()
    for one in part.group_rewards:
        try:
            values[one.name] = await _values(part, one, transcripts, calls)
        except JudgesSpent:
            if not part.settings.leave_out_spent:
                raise
            left_out.append(one.name)
    return GroupScore(values, tuple(left_out))


async def _values(
    task: Task, one: RewardFunction, transcripts: Sequence[Transcript], calls: Calls
) -> list[float]:
    what = f"group reward {one.name!r} of task {task.name!r}"
    found = await calls(what, one.function, list(transcripts))
    if not isinstance(found, Sequence) or not all(map(_is_finite, found)):
        raise UnusableTask(f"{what} returned {str(found)[:40]!r}: return a list of finite numbers")
    if len(found) != len(transcripts):
        raise UnusableTask(
            f"{what} returned {len(found)} numbers for {len(transcripts)} transcripts: return one "
            "for each, in their order"
        )
    return [float(value) for value in found]


def _is_finite(value: object) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)

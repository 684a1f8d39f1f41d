"""Scores the samples of an episode together, by the group rewards of its task."""

from collections.abc import Sequence

from composer_mesh.rollouts.group_rewards import FinishedRollout, GroupScore
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.calls import Calls
from composer_mesh.tasks.errors import JudgesSpent, UnusableTask, shown
from composer_mesh.tasks.reward import RewardFunction, Transcript, finite_number
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
    numbers = list(map(finite_number, found)) if isinstance(found, Sequence) else [None]
    kept = [number for number in numbers if number is not None]
    if len(kept) < len(numbers):
        raise UnusableTask(f"{what} returned {shown(found)!r}: return a list of finite numbers")
    if len(kept) != len(transcripts):
        raise UnusableTask(
            f"{what} returned {len(kept)} numbers for {len(transcripts)} transcripts: return one "
            "for each, in their order"
        )
    return kept

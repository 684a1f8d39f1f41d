"""Makes the order of a run's training episodes, with what the run has measured so far."""

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.curriculum import Curriculum, EpisodeOrder, InOrder, Source
from composer_mesh.services.run.resume_loader import ResumeContents
from composer_mesh.tasks.errors import TaskError, code_error
from composer_mesh.tasks.task import Task


def make_episode_order(config: Config, task: Task, past: ResumeContents) -> EpisodeOrder:
    """Return the order of a new or resumed run; an error of the task's own code names its line."""
    islands = config.islands
    share = (islands.rank, islands.world_size) if islands.on else (0, 1)
    if config.data.curriculum is None:
        return InOrder(*share)
    weights = [one.weight for one in config.data.tasks]
    sources = [
        Source(part.name, weight, _different_episodes(part))
        for part, weight in zip(task.parts, weights, strict=True)
    ]
    order = Curriculum(config.data.curriculum, config.run.seed, sources, task, *share)
    for step, results in past.results:
        order.settle(step, results)
    for group_id, stored in past.waiting.items():
        if stored.traces:
            order.restore(group_id, stored.traces[0].index)
    return order


def _different_episodes(task: Task) -> int | None:
    """Return the number of a task's training rows; None if it generates them."""
    try:
        rows = task.rows("train")
        return None if rows is None else len(rows)
    except (TaskError, ValueError):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise code_error(f"reading the rows of task {task.name!r}", error) from error

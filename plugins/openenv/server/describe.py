"""What a server says of itself: its metadata, the schemas, and its routes as OpenAPI.

And OpenEnv's Task API: which episodes there are. Only a row's place is shown, not what it holds.
"""

import inspect
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.plugins.openenv.client.wire import ERROR_PENALTY, ObservationData, StateData
from composer_mesh.plugins.openenv.server.session import LARGEST_INDEX, action_schema
from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskRunner

API_VERSION = "1.0.0"
ROUTES = {
    "/reset": "post",
    "/step": "post",
    "/state": "get",
    "/schema": "get",
    "/metadata": "get",
    "/health": "get",
    "/mcp": "post",
    "/rewards": "get",
    "/list_environments": "get",
    "/{env}/splits": "get",
    "/{env}/tasks": "post",
    "/{env}/num_tasks": "post",
    "/{env}/task": "post",
    "/{env}/task_range": "post",
}


def metadata(task: Task) -> dict[str, Any]:
    """Return the name of the environment, what it is for, and what an error costs there."""
    about = {"name": task.name, "description": description(task), "version": API_VERSION}
    penalty = max(part.settings.tool_error_penalty for part in task.parts)
    return {**about, ERROR_PENALTY: penalty} if penalty else about


def description(task: Task) -> str:
    """Return the first line of the task's docstring."""
    written = inspect.getdoc(type(task)) or f"The task {task.name}."
    return written.partition("\n")[0]


def schemas(task: Task) -> dict[str, Any]:
    """Return the JSON schemas of actions, observations and states."""
    return {
        "action": action_schema(task),
        "observation": ObservationData.model_json_schema(),
        "state": StateData.model_json_schema(),
    }


def openapi(task: Task) -> dict[str, Any]:
    """Return the routes."""
    answers = {"200": {"description": "JSON"}}
    paths = {path: {method: {"responses": answers}} for path, method in ROUTES.items()}
    info = {"title": task.name, "description": description(task), "version": API_VERSION}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


SPLITS: tuple[dict[str, str], ...] = (
    {"name": "train", "type": "train"},
    {"name": "heldout", "type": "test"},
)
MOST_TASKS = 10_000
"""Tasks of one answer."""


class UnnumberedEpisodes(Exception):
    """The episodes of a split are generated, so they have no number."""


class NoSuchTask(IndexError):
    """There is no task at that index."""


class SplitQuery(BaseModel):
    """A split."""

    model_config = ConfigDict(extra="ignore", strict=True)

    split: Split


class TaskQuery(SplitQuery):
    """A task of a split."""

    index: int = Field(ge=0, le=LARGEST_INDEX)


class RangeQuery(SplitQuery):
    """Tasks of a split from `start` to before `stop`."""

    start: int | None = Field(default=None, ge=0, le=LARGEST_INDEX)
    stop: int | None = Field(default=None, ge=0, le=LARGEST_INDEX)


async def num_tasks(runner: TaskRunner, split: Split) -> int:
    """Return how many episodes a split has; raise `UnnumberedEpisodes` where they are generated."""
    counts = [await _rows(runner, one, split) for one in runner.task.parts]
    if len(counts) > 1:
        raise UnnumberedEpisodes
    return counts[0]


async def task_range(runner: TaskRunner, query: RangeQuery) -> list[dict[str, Any]]:
    """Return tasks; raise `UnnumberedEpisodes` for an open end of generated episodes."""
    start = query.start or 0
    try:
        most = await num_tasks(runner, query.split)
        stop = most if query.stop is None else min(query.stop, most)
    except UnnumberedEpisodes:
        if query.stop is None:
            raise
        stop = query.stop
    if stop - start > MOST_TASKS:
        raise NoSuchTask(f"{stop - start:,} tasks: ask for at most {MOST_TASKS:,} at once")
    return [task_of(query.split, index) for index in range(start, stop)]


async def one_task(runner: TaskRunner, query: TaskQuery) -> dict[str, Any]:
    """Return a task; raise NoSuchTask beyond the last one."""
    try:
        most = await num_tasks(runner, query.split)
    except UnnumberedEpisodes:
        return task_of(query.split, query.index)
    if query.index >= most:
        raise NoSuchTask(f"index {query.index} of {most} tasks: ask for one from 0")
    return task_of(query.split, query.index)


def task_of(split: Split, index: int) -> dict[str, Any]:
    """Return what a client gives to reset."""
    return {"split": split, "index": index}


async def _rows(runner: TaskRunner, task: Task, split: Split) -> int:
    what = f"rows of task {task.name!r}"
    rows = await runner.run(runner.calls(what, task.rows, split))
    if rows is None:
        raise UnnumberedEpisodes
    return len(rows)

"""What a server says of itself: its metadata, the schemas, and its routes as OpenAPI."""

from __future__ import annotations

import inspect
from typing import Any

from composer_mesh.plugins.openenv.client.wire import ERROR_PENALTY, ObservationData, StateData
from composer_mesh.plugins.openenv.server.session import action_schema
from composer_mesh.tasks.task import Task

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

"""Composer Mesh: a training service for agentic language models on Monarch.

The names here are its public API (docs/tasks.md). Each is imported when it is first used, so that
reading a config never loads torch or Monarch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_mesh.rollouts.tasks import Episode, Outcome
    from composer_mesh.rollouts.traces import ErrorSite, Message
    from composer_mesh.tasks.errors import ToolError
    from composer_mesh.tasks.reward import Transcript, reward
    from composer_mesh.tasks.rows import Row, read_rows
    from composer_mesh.tasks.session import Reply, Session
    from composer_mesh.tasks.sync_session import SyncSession
    from composer_mesh.tasks.task import Task, TaskSettings
    from composer_mesh.tasks.tool import tool

_MODULES = {
    "Episode": "rollouts.tasks",
    "ErrorSite": "rollouts.traces",
    "Message": "rollouts.traces",
    "Outcome": "rollouts.tasks",
    "Reply": "tasks.session",
    "Row": "tasks.rows",
    "Session": "tasks.session",
    "SyncSession": "tasks.sync_session",
    "Task": "tasks.task",
    "TaskSettings": "tasks.task",
    "ToolError": "tasks.errors",
    "Transcript": "tasks.reward",
    "read_rows": "tasks.rows",
    "reward": "tasks.reward",
    "tool": "tasks.tool",
}
"""Module of each public name."""

__all__ = [
    "Episode",
    "ErrorSite",
    "Message",
    "Outcome",
    "Reply",
    "Row",
    "Session",
    "SyncSession",
    "Task",
    "TaskSettings",
    "ToolError",
    "Transcript",
    "read_rows",
    "reward",
    "tool",
]

# Monarch opens its log when it is imported, at a path that others could predict (mesh.monarch_log).
os.environ.setdefault("MONARCH_LOG_SUFFIX", os.urandom(16).hex())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

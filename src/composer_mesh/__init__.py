"""Composer Mesh: a training service for agentic language models on Monarch.

The names here are its public API: tasks and workflows (docs/tasks.md, docs/workflows.md),
losses and advantages (docs/losses.md), the trainer's backend (docs/trainer.md),
trackers (docs/trackers.md), commands and sections of configs (docs/plugins.md).
Each is imported when it is first used, so that reading a config never loads torch or Monarch.
Everything else may change.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_mesh.actors.models.backend import BackendContext, TorchBackend, TrainerBackend
    from composer_mesh.channels.port import Channel, ChannelRows
    from composer_mesh.configs.base import Section
    from composer_mesh.losses.custom_function import (
        AdvantageInputs,
        AdvantageOutputs,
        LossInputs,
        LossOutputs,
        loss_needs,
    )
    from composer_mesh.rollouts.batches import ChannelSample
    from composer_mesh.rollouts.tasks import Episode, Outcome
    from composer_mesh.rollouts.traces import ErrorSite, Message
    from composer_mesh.services.commands.parser import Command
    from composer_mesh.services.trackers.port import TrackedRun, TrackedStep, Tracker
    from composer_mesh.tasks.errors import JudgeFailed, JudgesSpent, ToolError
    from composer_mesh.tasks.judges import Judge, Judgement, JudgeQuestion, JudgeReply, quoted
    from composer_mesh.tasks.playing import SyncSession
    from composer_mesh.tasks.reward import Transcript, group_reward, reward, turn_reward
    from composer_mesh.tasks.rows import Row, read_rows
    from composer_mesh.tasks.session import Reply, Session
    from composer_mesh.tasks.task import Task, TaskSettings
    from composer_mesh.tasks.tool import tool
    from composer_mesh.tasks.workflow import (
        Agent,
        AgentWorkflow,
        CommandAgent,
        ContextFull,
        Conversation,
        Engine,
        FunctionAgent,
        Generated,
        Trajectory,
        Workflow,
    )

_MODULES = {
    "AdvantageInputs": "losses.custom_function",
    "AdvantageOutputs": "losses.custom_function",
    "Agent": "tasks.workflow",
    "AgentWorkflow": "tasks.workflow",
    "BackendContext": "actors.models.backend",
    "Channel": "channels.port",
    "ChannelRows": "channels.port",
    "ChannelSample": "rollouts.batches",
    "Command": "services.commands.parser",
    "CommandAgent": "tasks.workflow",
    "ContextFull": "tasks.workflow",
    "Conversation": "tasks.workflow",
    "Engine": "tasks.workflow",
    "Episode": "rollouts.tasks",
    "ErrorSite": "rollouts.traces",
    "FunctionAgent": "tasks.workflow",
    "Generated": "tasks.workflow",
    "Judge": "tasks.judges",
    "JudgeFailed": "tasks.errors",
    "JudgeQuestion": "tasks.judges",
    "JudgeReply": "tasks.judges",
    "Judgement": "tasks.judges",
    "JudgesSpent": "tasks.errors",
    "LossInputs": "losses.custom_function",
    "LossOutputs": "losses.custom_function",
    "Message": "rollouts.traces",
    "Outcome": "rollouts.tasks",
    "Reply": "tasks.session",
    "Row": "tasks.rows",
    "Section": "configs.base",
    "Session": "tasks.session",
    "SyncSession": "tasks.playing",
    "Task": "tasks.task",
    "TaskSettings": "tasks.task",
    "ToolError": "tasks.errors",
    "TorchBackend": "actors.models.backend",
    "TrackedRun": "services.trackers.port",
    "TrackedStep": "services.trackers.port",
    "Tracker": "services.trackers.port",
    "TrainerBackend": "actors.models.backend",
    "Trajectory": "tasks.workflow",
    "Transcript": "tasks.reward",
    "Workflow": "tasks.workflow",
    "group_reward": "tasks.reward",
    "loss_needs": "losses.custom_function",
    "quoted": "tasks.judges",
    "read_rows": "tasks.rows",
    "reward": "tasks.reward",
    "tool": "tasks.tool",
    "turn_reward": "tasks.reward",
}
"""Module of each public name."""

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "Agent",
    "AgentWorkflow",
    "BackendContext",
    "Channel",
    "ChannelRows",
    "ChannelSample",
    "Command",
    "CommandAgent",
    "ContextFull",
    "Conversation",
    "Engine",
    "Episode",
    "ErrorSite",
    "FunctionAgent",
    "Generated",
    "Judge",
    "JudgeFailed",
    "JudgeQuestion",
    "JudgeReply",
    "Judgement",
    "JudgesSpent",
    "LossInputs",
    "LossOutputs",
    "Message",
    "Outcome",
    "Reply",
    "Row",
    "Section",
    "Session",
    "SyncSession",
    "Task",
    "TaskSettings",
    "ToolError",
    "TorchBackend",
    "TrackedRun",
    "TrackedStep",
    "Tracker",
    "TrainerBackend",
    "Trajectory",
    "Transcript",
    "Workflow",
    "group_reward",
    "loss_needs",
    "quoted",
    "read_rows",
    "reward",
    "tool",
    "turn_reward",
]

# Monarch opens its log when it is imported, at a path that others could predict (mesh.monarch_log).
os.environ.setdefault("MONARCH_LOG_SUFFIX", os.urandom(16).hex())


def __getattr__(name: str) -> Any:
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

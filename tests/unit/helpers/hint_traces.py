"""Rollouts of the toolbox task by scripted policies, grown by ids as a real rollout grows."""

from __future__ import annotations

from collections.abc import Sequence

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.toolbox import ToolboxTask

EXPERT = "expert"
"""Stands in a script for the task's own right action."""
QUIT = "I can not answer."
WRONG_KEY = call_text("lookup", {"key": "lamp value"})
NO_JSON = "<tool_call>\nno json\n</tool_call>"
SCRIPTS = {
    "right": [EXPERT] * 6,
    "stumbles": [WRONG_KEY, *[EXPERT] * 5],
    "fails twice": [WRONG_KEY, NO_JSON, QUIT],
    "quits": [QUIT],
}


def play(
    task: ToolboxTask, chat: ChatFormat, index: int, script: Sequence[str], sample: int = 0
) -> Trace:
    """One rollout of an episode; its group is the episode's index."""
    episode = task.episode("train", index)
    session = SyncSession(task, episode)
    fresh, turns, sites = chat.first_prompt(session.messages), [], list[ErrorSite]()
    for line in script:
        text = task.expert(session.messages) if line == EXPERT else line
        ids = chat.action(text)
        turns.append(Turn(fresh, ids, [-1.0] * len(ids), [0] * len(ids), "stop"))
        result = session.step(text)
        sites += [result.error] if result.error is not None else []
        if result.done:
            break
        fresh = chat.continuation(result.messages, chat.stop_ids[:1])
    name, outcome = f"train-{index:06d}-{sample:03d}", session.outcome()
    return Trace(
        name, index, sample, task.name, "train", index, turns, outcome.messages, outcome.reward,
        outcome.success, sites, dict(outcome.rewards), outcome.answer,
    )  # fmt: skip


def group_of(
    task: ToolboxTask, chat: ChatFormat, index: int, scripts: Sequence[str]
) -> list[Trace]:
    """One rollout for each named script."""
    return [play(task, chat, index, SCRIPTS[name], sample) for sample, name in enumerate(scripts)]

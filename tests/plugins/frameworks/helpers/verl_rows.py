"""Samples of this project as rows of a step on verl's engine, and scripts for its agent loops."""

from typing import Any

from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PolicySample, StepBatch
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import Task


def row_of(one: PolicySample, views: list[HintedView]) -> Any:
    """A sample as a row: what comes before its first sampled id is the prompt."""
    from composer_mesh.plugins.frameworks.verl.steps import Row

    first = one.mask.index(True)
    each = one.advantage if isinstance(one.advantage, list) else [one.advantage] * len(one.ids)
    mask = [int(trained) for trained in one.mask[first:]]
    return Row(one.ids[:first], one.ids[first:], mask, one.logprobs[first:], each[first:], views)


def views_of(batch: StepBatch, one: PolicySample) -> list[HintedView]:
    """The hinted turns of a sample."""
    return [view for view in batch.views if view.trace_id == one.trace_id]


def answers_of(task: Task, index: int = 0) -> list[str]:
    """The actions of an episode: a call of a tool that does not exist, then the expert's own."""
    said = [call_text("no_such_tool", {})]
    with SyncSession(task, task.episode("train", index)) as session:
        session.step(said[0])
        while True:
            said.append(task.expert(session.messages))
            if session.step(said[-1]).done:
                return said

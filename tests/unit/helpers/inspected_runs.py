"""Run directories to look back into: a store with groups, steps, pairs and late rewards in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offline_runs import play

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair, Provenance, TeacherVote
from composer_mesh.rollouts.tool_calls import assistant_message, call_text
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.replay.teacher_queries import TeacherQueryRecord, query_record_to_json
from composer_mesh.services.steps.step_manifest import ReplayOutcome
from composer_mesh.services.store.rows import GroupState, LateReward, TraceRow
from composer_mesh.services.store.writing import RunStore
from composer_mesh.services.traces.listing import Listed
from composer_mesh.tasks.toolbox import ToolboxTask

SIZE = 3


def group_of(task: ToolboxTask, group_id: int) -> list[Trace]:
    return [play(task, group_id, sample) for sample in range(SIZE)]


def a_trace(name: str = "train-000000-000", **changes: Any) -> Trace:
    """A rollout of one turn, which failed; its `messages` are a question and an answer."""
    turn = Turn([1, 2, 3], [4, 5], [-0.5, -1.5], [6, 7], "stop")
    said: list[Message] = [
        {"role": "user", "content": "How much?"},
        {"role": "assistant", "content": "Answer: 3"},
    ]
    site = ErrorSite(0, "wrong_answer", "wrong_answer", {"answer": "3"})
    values: dict[str, Any] = {
        "group_id": 0,
        "sample": 0,
        "task": "toolbox",
        "split": "train",
        "index": 0,
        "turns": [turn],
        "messages": said,
        "reward": 0.0,
        "success": False,
        "error_sites": [site],
    }
    return Trace(name, **(values | changes))


def row_of(trace: Trace, state: GroupState = GroupState.FINISHED) -> TraceRow:
    """The row of a rollout in the store's index."""
    versions = [version for turn in trace.turns for version in turn.versions]
    return TraceRow(
        trace.trace_id,
        trace.group_id,
        trace.sample,
        trace.task,
        trace.split,
        trace.index,
        trace.reward,
        trace.success,
        len(trace.turns),
        trace.action_tokens(),
        len(trace.token_ids()),
        tuple(site.error_kind for site in trace.error_sites),
        min(versions, default=None),
        max(versions, default=None),
        state,
    )


def listed_of(trace: Trace, step: int | None = None, late: LateReward | None = None) -> Listed:
    state = GroupState.FINISHED if step is None else GroupState.TRAINED
    return Listed(row_of(trace, state), step, late)


def a_pair(trace: Trace, turn: int = 0, **changes: Any) -> PreferencePair:
    """What two of three teachers prefer to a rollout's action."""
    chosen, rejected = call_text("lookup", {"key": "lamp"}), "I can not answer."
    voices = (
        TeacherVote("near", "call", 'lookup {"key":"lamp"}', with_majority=True, usd=0.001),
        TeacherVote("far", "call", 'lookup {"key":"lamp"}', with_majority=True, cached=True),
        TeacherVote("odd", "words", "no idea", with_student=True),
    )
    pair = PreferencePair(
        pair_id=f"{trace.trace_id}/{turn}",
        state_id=f"{trace.trace_id}/{turn}",
        trace_id=trace.trace_id,
        turn=turn,
        messages=trace.messages[:1],
        context_ids=[1, 2, 3],
        chosen_text=chosen,
        chosen_message=assistant_message(chosen, "call_0"),
        rejected_text=rejected,
        rejected_message=assistant_message(rejected, "call_0"),
        rejected_ids=[4, 5],
        rejected_version=trace.oldest_version(),
        teachers=["near", "far"],
        votes=3,
        asked=3,
        usd=0.001,
        usd_known=True,
        provenance=Provenance(2, voices),
    )
    return replace(pair, **changes)


async def write_run(
    root: Path, config: Config, groups: Sequence[Sequence[Trace]], steps: int = 0
) -> list[PreferencePair]:
    """A run that has finished these groups and trained `steps` steps of them.

    The first rollout of each group has a pair that is kept, and the second one that a filter has
    dropped.
    """
    size, kept = config.schedule.prompts_per_step, list[PreferencePair]()
    with RunStore(root, config) as store:
        for place, group in enumerate(groups):
            group_id = group[0].group_id
            store.enter(group_id, place // size)
            await store.add_group(group_id, group)
            pairs = [a_pair(group[0]), a_pair(group[1])]
            asked = TeacherQueryRecord(group_id, [], ReplayOutcome(states=2), pairs)
            asked.replay_outcome.outcomes["pair"] = 2
            body = query_record_to_json(asked, pairs[:1])
            kept += await store.add_teacher_queries(group_id, body, pairs[:1])
        for step in range(steps):
            taken = groups[step * size : (step + 1) * size]
            ids = [group[0].group_id for group in taken]
            names = [pair.pair_id for pair in kept if int(pair.pair_id.split("-")[1]) in ids]
            await store.plan_step(step, ids, b"{}", names)
            await store.end_step(step, {"step": step + 1})
    return kept

"""A run in which one group outlives many steps, is killed meanwhile, and goes on."""

from __future__ import annotations

import re

from shared_runs import CARRIED, HELD, Resumed, taken_groups

from composer_mesh.rollouts.traces import Trace

STEPS, AGE = CARRIED["run.steps"], CARRIED["schedule.max_token_age"]


def traces_of(run: Resumed, group: int) -> list[Trace]:
    return [trace for trace in run.run.traces() if trace.group_id == group]


def step_of(run: Resumed) -> int:
    """The step, from 0, that trains the group which waits at the gate."""
    (step,) = [n for n, groups in enumerate(taken_groups(run.run.root)) if HELD in groups]
    return step


def test_steps_go_on_without_a_slow_group_which_a_later_step_trains(carried: Resumed) -> None:
    assert carried.status == 0, carried.run.stderr
    groups, step = taken_groups(carried.run.root), step_of(carried)
    assert step >= carried.stopped.seen["steps"] + 5
    assert sorted(group for taken in groups for group in taken) == list(range(2 * STEPS))
    assert [len(taken) for taken in groups] == [2] * STEPS
    first = carried.run.events("groups_carried")[0]["detail"]
    assert first.startswith("step 1 passes over unfinished groups (")
    assert str(HELD) in re.findall(r"\d+", first.partition("(")[2].partition(")")[0])
    figures = carried.run.objects("metrics.jsonl")
    assert all(1 <= one["rollouts/carried"] <= 2 for one in figures[:step])
    assert figures[-1]["rollouts/carried"] == 0


def test_the_old_tokens_of_the_slow_group_are_context_only(carried: Resumed) -> None:
    step = step_of(carried)
    versions = [trace.versions() for trace in traces_of(carried, HELD)]
    assert all(one[0] < step - AGE <= one[-1] for one in versions), "before and behind the gate"
    aged = sum(version < step - AGE for one in versions for version in one)
    figures = carried.run.objects("metrics.jsonl")
    assert figures[step]["tokens/aged"] >= aged > 0
    assert max(one["lag/max"] for one in figures) <= AGE


def test_a_killed_run_trains_again_what_it_had_planned_and_samples_the_carried_group_anew(
    carried: Resumed,
) -> None:
    before = carried.stopped.seen
    assert taken_groups(carried.run.root)[: len(before["groups"])] == before["groups"]
    assert all(HELD not in taken for taken in before["groups"])
    oldest = min(trace.oldest_version() for trace in traces_of(carried, HELD))
    assert oldest >= before["steps"]

"""Audits a run's files for violations caused by faults.

Everything that was trained is on disk once, no token is older or newer than the rules allow, no
trace is broken. `chaos_logprobs` checks whether recorded versions are true.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taken_groups import TakenGroups, violations

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.traces import Trace


@dataclass(frozen=True)
class Audit:
    """Counts of violations; every count is 0 in a correct run."""

    traces_lost: int
    duplicates: int
    broken: int
    lag_breaks: int
    from_the_future: int
    given_up: int = 0
    """Samples that the run reports as given up: quarantined, or out of retries."""
    violations: tuple[str, ...] = ()
    """What steps took, trained or dropped against the rules, one line each."""


def audit(
    traces: Sequence[Trace],
    metrics: Sequence[Mapping[str, Any]],
    taken: Sequence[TakenGroups],
    first_seen: Mapping[str, int],
    poisoned: Sequence[Mapping[str, Any]],
    schedule: ScheduleConfig,
) -> Audit:
    """Audit a run's training traces.

    `taken` are the groups of each step by its manifest; `first_seen` is, per trace, the number of
    steps done when it was first read, so it cannot have been sampled later; `poisoned` are the
    lines of poisoned.jsonl.
    """
    trained = [trace for trace in traces if trace.split == "train"]
    unique = {trace.trace_id: trace for trace in trained}
    by_group: dict[int, list[Trace]] = {}
    for trace in unique.values():
        by_group.setdefault(trace.group_id, []).append(trace)
    size = schedule.group_size
    missing, given_up = _missing(by_group, metrics, taken, _set_aside(poisoned), size)
    return Audit(
        traces_lost=missing,
        duplicates=len(trained) - len(unique),
        broken=sum(map(is_broken, unique.values())),
        lag_breaks=sum(_lag_breaks(one, by_group, schedule.max_lag) for one in taken),
        from_the_future=sum(
            _tokens_above(one, first_seen[one.trace_id] + 1)
            for one in unique.values()
            if one.trace_id in first_seen
        ),
        given_up=given_up,
        violations=tuple(violations(taken, lambda group: by_group.get(group, ()), schedule)),
    )


def _missing(
    by_group: Mapping[int, Sequence[Trace]],
    metrics: Sequence[Mapping[str, Any]],
    taken: Sequence[TakenGroups],
    set_aside: frozenset[int],
    group_size: int,
) -> tuple[int, int]:
    """Count the samples of trained steps missing on disk: lost, and reported as given up.

    Those of groups that a step has dropped count too; of a step without a manifest all do.
    """
    by_step = {one.step: one for one in taken}
    never_stored = short = excused = 0
    for line in metrics:
        step = by_step.get(line["step"] - 1, TakenGroups(line["step"] - 1, ()))
        present = {group: len(by_group.get(group, ())) for group in step.all}
        stored = sum(present[group] for group in step.trained)
        count, sampled = line["rollouts/count"], line.get("rollouts/sampled")
        never_stored += max(0, count - stored)
        if sampled is not None:
            never_stored += max(0, sampled - count - (sum(present.values()) - stored))
        gaps = {group: group_size - here for group, here in present.items()}
        excused += sum(gap for group, gap in gaps.items() if group in set_aside)
        short += sum(gap for group, gap in gaps.items() if group not in set_aside)
    given_up = int(sum(line.get("rollouts/given_up") or 0 for line in metrics))
    return max(never_stored, short - given_up), excused + min(given_up, short)


def _set_aside(poisoned: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return groups whose samples may be missing: a training episode's index is its group's."""
    episodes = [line["episode"] for line in poisoned]
    return frozenset(one["index"] for one in episodes if one["split"] == "train")


def is_broken(trace: Trace) -> bool:
    """Whether a trace is no finished episode: no turns, or inconsistent with its messages."""
    answers = Counter(message["role"] for message in trace.messages)["assistant"]
    empty = any(not turn.action_ids for turn in trace.turns)
    return not trace.turns or empty or answers != len(trace.turns)


def _lag_breaks(taken: TakenGroups, by_group: Mapping[int, Sequence[Trace]], max_lag: int) -> int:
    """Count trained tokens older than the window allows, or newer than their step."""
    allowed = range(max(0, taken.step - max_lag), taken.step + 1)
    traces = [trace for group in taken.trained for trace in by_group.get(group, ())]
    turns = [turn for trace in traces for turn in trace.turns]
    return sum(version not in allowed for turn in turns for version in turn.versions)


def _tokens_above(trace: Trace, newest: int) -> int:
    return sum(version > newest for turn in trace.turns for version in turn.versions)

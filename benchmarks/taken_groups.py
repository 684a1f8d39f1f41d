"""The groups that each step of a run took, and whether it was allowed to take and drop them.

Steps take groups in order of entry. With dynamic sampling a step drops groups whose rewards are all
equal, or whose tokens are too old, and takes others until it has enough or may take no more. What a
step took is read from its manifest; whether it was right is computed from the stored rollouts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.steps.step_manifest import StepManifest, manifest_from_json
from composer_mesh.services.store.reading import RunReader

TracesOf = Callable[[int], Sequence[Trace]]


@dataclass(frozen=True)
class TakenGroups:
    """The groups that step `step`, counted from 0, trained and dropped."""

    step: int
    trained: tuple[int, ...]
    dropped: tuple[int, ...] = ()

    @classmethod
    def of(cls, manifest: StepManifest) -> "TakenGroups":
        return cls(manifest.step, manifest.groups, manifest.dropped)

    @property
    def all(self) -> list[int]:
        """The groups that it took, in order of entry."""
        return sorted((*self.trained, *self.dropped))


def taken_groups(reader: RunReader) -> list[TakenGroups]:
    """Return the groups of each planned step, in order."""
    return [TakenGroups.of(manifest_from_json(one.step, one.manifest)) for one in reader.steps()]


def violations(
    taken: Sequence[TakenGroups], traces: TracesOf, schedule: ScheduleConfig
) -> list[str]:
    """Return a line for everything that steps took, dropped or kept against the rules."""
    return [
        f"step {one.step + 1} {what}"
        for first, one in zip(_first_groups(taken), taken, strict=True)
        for what in (
            *_out_of_order(first, one),
            *_wrong_number(one, schedule),
            *_wrongly_sorted(one, traces, schedule),
        )
    ]


def _first_groups(taken: Sequence[TakenGroups]) -> Iterator[int]:
    """Yield the group at which each step has to start."""
    first = 0
    for one in taken:
        yield first
        first += len(one.all)


def _out_of_order(first: int, one: TakenGroups) -> Iterator[str]:
    wanted = list(range(first, first + len(one.all)))
    if one.all != wanted:
        yield f"took the groups {one.all} and not {wanted}"


def _wrong_number(one: TakenGroups, schedule: ScheduleConfig) -> Iterator[str]:
    trained, most = len(one.trained), schedule.groups_per_step
    if len(one.all) > most:
        yield f"took {len(one.all)} groups and may take {most}"
    if trained > schedule.prompts_per_step:
        yield f"trained {trained} groups in place of {schedule.prompts_per_step}"
    if trained < schedule.prompts_per_step and len(one.all) < most:
        yield f"trained {trained} groups, and stopped after {len(one.all)} of {most}"


def _wrongly_sorted(one: TakenGroups, traces: TracesOf, schedule: ScheduleConfig) -> Iterator[str]:
    for group in one.dropped:
        if not schedule.dynamic_sampling or not _may_drop(traces(group), one.step, schedule):
            yield f"dropped group {group}, whose rewards differ and whose tokens are new enough"
    for group in one.trained:
        if schedule.dynamic_sampling and equal_rewards(traces(group)):
            yield f"trained group {group}, whose rewards are all equal"


def _may_drop(traces: Sequence[Trace], step: int, schedule: ScheduleConfig) -> bool:
    versions = [version for one in traces for turn in one.turns for version in turn.versions]
    return equal_rewards(traces) or min(versions, default=step) < step - schedule.max_lag

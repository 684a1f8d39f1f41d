"""Audits a run directory after each kill, comparing it with earlier audits.

Reads only the store, and no reports of the run itself.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from taken_groups import TakenGroups, violations

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.steps.step_manifest import manifest_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, GroupState


@dataclass
class Audit:
    """The findings over all audits of one run. `seen` are finished groups with their checksums.

    A group that a step dropped is not skipped; whether it was allowed to is in `violations`.
    """

    schedule: ScheduleConfig
    seen: dict[int, int] = field(default_factory=dict)
    steps: dict[int, bytes] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    twice: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    violations: set[str] = field(default_factory=set)
    """What steps took, trained or dropped against the rules."""
    notes: list[str] = field(default_factory=list)

    def look(self, root: Path, when: str) -> int:
        """Audit a directory in which nothing runs; return the number of steps done."""
        with RunReader(root) as reader:
            self._groups(reader, when)
            return self._steps(reader, when)

    def _groups(self, reader: RunReader, when: str) -> None:
        rows = {row.group_id: row for row in reader.groups()}
        for group_id, crc in self.seen.items():
            row = rows.get(group_id)
            if row is None or row.crc != crc or not _readable(reader, group_id):
                self.lost.add(group_id)
                self.notes.append(f"{when}: group {group_id} was finished and is lost or another")
        finished = (GroupState.FINISHED, GroupState.TRAINED)
        self.seen |= {n: row.crc for n, row in rows.items() if row.state in finished}

    def _steps(self, reader: RunReader, when: str) -> int:
        rows = list(reader.steps(superseded=True))
        times: Counter[int] = Counter()
        taken: dict[int, TakenGroups] = {}
        for row in rows:
            one = TakenGroups.of(manifest_from_json(row.step, row.manifest))
            taken[row.step] = one
            times.update(one.all)
            if self.steps.setdefault(row.step, row.manifest) != row.manifest:
                self.twice |= set(one.all)
                self.notes.append(f"{when}: step {row.step} was planned anew")
        self.twice |= {group_id for group_id, count in times.items() if count > 1}
        self.skipped |= set(range(self._groups_of(len(self.steps), times))) - set(times)
        self._rules(reader, [taken[step] for step in sorted(taken)], when)
        return sum(row.metrics is not None for row in rows)

    def _groups_of(self, steps: int, taken: Collection[int]) -> int:
        """Return how many groups so many steps take: with dynamic sampling, up to the last one."""
        if self.schedule.dynamic_sampling:
            return max(taken, default=-1) + 1
        return steps * self.schedule.prompts_per_step

    def _rules(self, reader: RunReader, taken: Sequence[TakenGroups], when: str) -> None:
        found = set(violations(taken, partial(_readable, reader), self.schedule))
        self.notes += [f"{when}: {what}" for what in sorted(found - self.violations)]
        self.violations |= found


def _readable(reader: RunReader, group_id: int) -> list[Trace]:
    """Return the rollouts of a group; none of one that is damaged, which counts as lost."""
    try:
        return reader.traces(group_id)
    except DamagedRecord:
        return []

"""Audits a run directory after each kill, comparing it with earlier audits.

Reads only the store, and no reports of the run itself.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from composer_mesh.services.steps.step_manifest import manifest_from_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, GroupState


@dataclass
class Audit:
    """The findings over all audits of one run. `seen` are finished groups with their checksums."""

    prompts_per_step: int
    seen: dict[int, int] = field(default_factory=dict)
    steps: dict[int, bytes] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    twice: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
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
            if row is None or row.crc != crc or not self._reads(reader, group_id):
                self.lost.add(group_id)
                self.notes.append(f"{when}: group {group_id} was finished and is lost or another")
        finished = (GroupState.FINISHED, GroupState.TRAINED)
        self.seen |= {n: row.crc for n, row in rows.items() if row.state in finished}

    def _reads(self, reader: RunReader, group_id: int) -> bool:
        try:
            return bool(reader.traces(group_id))
        except DamagedRecord:
            return False

    def _steps(self, reader: RunReader, when: str) -> int:
        rows = list(reader.steps(superseded=True))
        trained: Counter[int] = Counter()
        for row in rows:
            trained.update(manifest_from_json(row.step, row.manifest).groups)
            if self.steps.setdefault(row.step, row.manifest) != row.manifest:
                self.twice |= set(manifest_from_json(row.step, row.manifest).groups)
                self.notes.append(f"{when}: step {row.step} was planned anew")
        self.twice |= {group_id for group_id, times in trained.items() if times > 1}
        expected = set(range(len(self.steps) * self.prompts_per_step))
        self.skipped |= expected - set(trained)
        return sum(row.metrics is not None for row in rows)

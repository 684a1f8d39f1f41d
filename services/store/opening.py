"""A run directory before it is written to again: what a stop or a fault left is put in order.

    drafts of files                                     removed: they were never used
    damaged rows                                        quarantined (`row_checksums`)
    files of groups that have no finished row           quarantined: a stop between file and row
    files of groups that wait for their step, damaged   quarantined, and the group is sampled again

What was trained is not read here: a replay reads it, and `composer-mesh verify` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.services.store.group_files import FOLDER, SUFFIX, group_of, path_of, read_group
from composer_mesh.services.store.quarantine import quarantine
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.records import RunRecords
from composer_mesh.services.store.row_checksums import WHY, set_rows_aside
from composer_mesh.services.store.rows import DamagedRecord, GroupRow, GroupState

NO_ROW = "run.sqlite has no finished group for it"


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved away, why, its new place where it has one, and the group that it was of."""

    where: str
    why: str
    place: Path | None = None
    group: int | None = None


def repair_on_open(root: Path, records: RunRecords, reading: RunReader) -> list[Moved]:
    """Put a run directory in order; returns what was moved to quarantine."""
    for draft in root.glob(f"{FOLDER}/*/.*"):
        draft.unlink()
    moved = [Moved(str(row), WHY) for row in set_rows_aside(root, records.file)]
    moved += [move_file(root, path, NO_ROW) for path in orphans(root, reading)]
    for row in reading.groups(GroupState.FINISHED):
        try:
            if row.traces:
                read_group(root, row.group_id, row.bytes, row.crc)
        except DamagedRecord as error:
            records.forget_group(row.group_id)
            moved.append(move_file(root, path_of(root, row.group_id), error.why))
    _index(root, records, reading)
    return moved


def move_file(root: Path, path: Path, why: str) -> Moved:
    """Move a group's file to quarantine."""
    place = quarantine(root, path)
    return Moved(str(path.relative_to(root)), why, place, group_of(path))


def orphans(root: Path, reading: RunReader) -> Iterator[Path]:
    """Files of groups that no row speaks of, in their order."""
    known = {row.group_id for row in reading.groups() if row.traces}
    for path in sorted(root.glob(f"{FOLDER}/*/*{SUFFIX}")):
        group_id = group_of(path)
        if group_id not in known or path_of(root, group_id) != path:
            yield path


def unindexed(reading: RunReader) -> list[GroupRow]:
    """Groups that have fewer rows in the index than rollouts in their files, or more."""
    with reading.file.reading() as rows:
        counts = dict(rows.execute("SELECT group_id, COUNT(*) FROM traces GROUP BY group_id"))
    return [row for row in reading.groups() if row.traces != counts.get(row.group_id, 0)]


def _index(root: Path, records: RunRecords, reading: RunReader) -> None:
    for row in unindexed(reading):
        try:
            traces = read_group(root, row.group_id, row.bytes, row.crc)
        except DamagedRecord:
            continue  # it was trained: whoever needs it finds the damage
        records.index(row.group_id, traces)

"""Repair of a run directory after a stop or a fault, before it is written again.

    drafts of files                                     removed: they were never used
    damaged rows                                        quarantined (`row_checksums`)
    files of groups without a finished row              quarantined: a stop between file and row
    damaged files of groups that wait for their step    quarantined; the group is sampled again

Files of trained groups are not read here: a replay reads them, and `composer-mesh verify` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.checkpoints.quarantine import quarantine
from composer_mesh.services.store.group_files import FOLDER, SUFFIX, group_of, path_of, read_group
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.records import RunRecords
from composer_mesh.services.store.row_checksums import WHY, set_rows_aside
from composer_mesh.services.store.rows import DamagedRecord, GroupRow, GroupState

NO_ROW = "run.sqlite has no finished group for it"


@dataclass(frozen=True, slots=True)
class QuarantinedItem:
    """A quarantined file or row, the reason, its new path and its group, where they apply."""

    where: str
    why: str
    place: Path | None = None
    group: int | None = None


def repair_on_open(root: Path, records: RunRecords, reading: RunReader) -> list[QuarantinedItem]:
    """Repair a run directory; return what was quarantined."""
    for draft in root.glob(f"{FOLDER}/*/.*"):
        draft.unlink()
    moved = [QuarantinedItem(str(row), WHY) for row in set_rows_aside(root, records.file)]
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


def move_file(root: Path, path: Path, why: str) -> QuarantinedItem:
    """Move a group's file to quarantine."""
    place = quarantine(root, path) if path.exists() else None
    return QuarantinedItem(str(path.relative_to(root)), why, place, group_of(path))


def orphans(root: Path, reading: RunReader) -> Iterator[Path]:
    """Yield the group files without a row, in order."""
    known = {row.group_id for row in reading.groups() if row.traces}
    for path in sorted(root.glob(f"{FOLDER}/*/*{SUFFIX}")):
        group_id = group_of(path)
        if group_id not in known or path_of(root, group_id) != path:
            yield path


def unindexed(reading: RunReader) -> list[GroupRow]:
    """Return groups whose number of index rows differs from the number of their rollouts."""
    with reading.file.reading() as rows:
        counts = dict(rows.execute("SELECT group_id, COUNT(*) FROM traces GROUP BY group_id"))
    return [row for row in reading.groups() if row.traces != counts.get(row.group_id, 0)]


def _index(root: Path, records: RunRecords, reading: RunReader) -> None:
    for row in unindexed(reading):
        try:
            traces = read_group(root, row.group_id, row.bytes, row.crc)
        except DamagedRecord:
            continue  # it was trained: its damage is reported when it is read
        records.index(row.group_id, traces)

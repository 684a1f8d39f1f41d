"""Detection and quarantine of rows of `run.sqlite` with a wrong checksum.

Such rows are moved to `quarantine/rows.jsonl`. The run compensates: it samples the group again,
repeats the query, or omits a figure; an index row is rebuilt from its group's file. A step cannot
be replaced, so a run with a damaged step is not opened.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoints.quarantine import FOLDER
from composer_mesh.actors.sqlite_file import SqliteFile
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.store.rows import DamagedRecord
from composer_mesh.services.store.schema import COLUMNS, whole
from composer_mesh.services.store.writer_thread import Lines

WHY = "its checksum is that of another row"
REPAIR = "take run.sqlite from a copy of the run, or begin a new run from one of its checkpoints"
ROWS_FILE = "rows.jsonl"


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row with a wrong checksum."""

    table: str
    rowid: int

    def __str__(self) -> str:
        return f"{STORE_FILE}, table {self.table}, row {self.rowid}"


def damaged_rows(file: SqliteFile) -> Iterator[DamagedRow]:
    """Yield all damaged rows, table by table. Reads the complete file."""
    for table in COLUMNS:
        with file.reading() as rows:
            select = f"SELECT rowid FROM {table} WHERE NOT ({whole(table)})"
            found = [rowid for (rowid,) in rows.execute(select)]
        yield from (DamagedRow(table, rowid) for rowid in found)


def set_rows_aside(root: Path, file: SqliteFile) -> list[DamagedRow]:
    """Quarantine damaged rows; raise DamagedRecord for a damaged step."""
    damaged = list(damaged_rows(file))
    for row in damaged:
        if row.table == "steps":
            raise DamagedRecord(str(row), WHY, REPAIR)
    if damaged:
        _keep(root, file, damaged)
        with file.transaction() as rows:
            for row in damaged:
                rows.execute(f"DELETE FROM {row.table} WHERE rowid = ?", (row.rowid,))
            rows.execute("DELETE FROM traces WHERE group_id NOT IN (SELECT group_id FROM groups)")
    return damaged


def _keep(root: Path, file: SqliteFile, damaged: list[DamagedRow]) -> None:
    kept = Lines(root)
    for row in damaged:
        select = f"SELECT * FROM {row.table} WHERE rowid = ?"
        with file.reading() as rows:
            values = rows.execute(select, (row.rowid,)).fetchone()
        kept.add(
            f"{FOLDER}/{ROWS_FILE}", json.dumps([str(row), *map(_text, values)]).encode(), copy=True
        )
    kept.sync()
    kept.close()


def _text(value: Any) -> Any:
    """Convert a value for JSON: bytes as latin-1 text, which is lossless."""
    return value.decode("latin-1") if isinstance(value, bytes) else value

"""Tables of `run.sqlite`, and the checksum of each row.

SQLite checks the structure of its pages, but not the contents of a row. Each row therefore has a
CRC-32 of its columns in the column `seal`, which triggers maintain and every reader compares. The
names on disk are those of version 1 and do not change. `rows` defines the Python values.

Detection and quarantine of rows of `run.sqlite` with a wrong checksum.

Such rows are moved to `quarantine/rows.jsonl`. The run compensates: it samples the group again,
repeats the query, or omits a figure; an index row is rebuilt from its group's file. A step cannot
be replaced, so a run with a damaged step is not opened.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_mesh.actors.checkpoints.manifest import FOLDER
from composer_mesh.actors.sqlite_file import FileKind, SqliteFile
from composer_mesh.services.directory.file_checksums import AppendedLines
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.store.rows import DamagedRecord

COLUMNS = {
    "groups": "group_id, state, entered, finished_at, trained, traces, bytes, crc, worded",
    "traces": "trace_id, group_id, sample, task, split, number, reward, success, turns, tokens, "
    "length, error_kinds, oldest_version, newest_version",
    "asked": "group_id, body",
    "pairs": "place, pair_id, group_id, version, state, step, body",
    "rewards": "place, trace_id, reward, source, posted, state, step",
    "steps": "place, step, state, recipe, metrics",
    "evaluations": "place, step, state, body",
    "poisoned": "place, body",
    "divergences": "place, step, trace_id, turn, body",
}
"""Columns of each table except its checksum."""

TABLES = (
    "CREATE TABLE groups (group_id INTEGER PRIMARY KEY, state TEXT NOT NULL "
    "CHECK (state IN ('in_flight', 'finished', 'trained', 'damaged')), entered INTEGER NOT NULL, "
    "finished_at REAL, trained INTEGER, traces INTEGER NOT NULL DEFAULT 0, "
    "bytes INTEGER NOT NULL DEFAULT 0, crc INTEGER NOT NULL DEFAULT 0, worded BLOB, seal INTEGER)",
    "CREATE TABLE traces (trace_id TEXT NOT NULL UNIQUE, group_id INTEGER NOT NULL, "
    "sample INTEGER NOT NULL, task TEXT NOT NULL, split TEXT NOT NULL, number INTEGER NOT NULL, "
    "reward REAL NOT NULL, success INTEGER NOT NULL, turns INTEGER NOT NULL, "
    "tokens INTEGER NOT NULL, length INTEGER NOT NULL, error_kinds TEXT NOT NULL, "
    "oldest_version INTEGER, newest_version INTEGER, seal INTEGER)",
    "CREATE INDEX traces_of_groups ON traces (group_id, sample)",
    "CREATE TABLE asked (group_id INTEGER PRIMARY KEY, body BLOB NOT NULL, seal INTEGER)",
    "CREATE TABLE pairs (place INTEGER PRIMARY KEY, pair_id TEXT NOT NULL, group_id INTEGER, "
    "version INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'waiting' "
    "CHECK (state IN ('waiting', 'trained', 'expired', 'superseded')), "
    "step INTEGER, body BLOB NOT NULL, seal INTEGER)",
    "CREATE UNIQUE INDEX pairs_that_count ON pairs (pair_id) WHERE state != 'superseded'",
    "CREATE INDEX waiting_pairs ON pairs (state, place)",
    "CREATE INDEX pairs_of_groups ON pairs (group_id, place)",
    "CREATE TABLE rewards (place INTEGER PRIMARY KEY, trace_id TEXT NOT NULL, "
    "reward REAL NOT NULL, source TEXT NOT NULL, posted REAL NOT NULL, "
    "state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'trained', 'expired')), "
    "step INTEGER, seal INTEGER)",
    "CREATE INDEX waiting_rewards ON rewards (state, place)",
    "CREATE TABLE steps (place INTEGER PRIMARY KEY, step INTEGER NOT NULL, state TEXT NOT NULL "
    "CHECK (state IN ('planned', 'done', 'superseded')), recipe BLOB NOT NULL, metrics BLOB, "
    "seal INTEGER)",
    "CREATE UNIQUE INDEX steps_that_count ON steps (step) WHERE state != 'superseded'",
    "CREATE TABLE evaluations (place INTEGER PRIMARY KEY, step INTEGER NOT NULL, "
    "state TEXT NOT NULL DEFAULT 'done' CHECK (state IN ('done', 'superseded')), "
    "body BLOB NOT NULL, seal INTEGER)",
    "CREATE TABLE poisoned (place INTEGER PRIMARY KEY, body BLOB NOT NULL, seal INTEGER)",
    "CREATE TABLE divergences (place INTEGER PRIMARY KEY, step INTEGER NOT NULL, "
    "trace_id TEXT NOT NULL, turn INTEGER NOT NULL, body BLOB NOT NULL, seal INTEGER)",
    "CREATE INDEX divergences_of_steps ON divergences (step, place)",
)


TEXT = {"state", "trace_id", "task", "split", "error_kinds", "pair_id", "source"}


def whole(table: str) -> str:
    """Return an SQL expression that is true for a row with a correct checksum."""
    return f"{table}.seal IS {_checksum_of(table)}"


def _checksum_of(table: str) -> str:
    """Return the SQL of a row's checksum. Text is cast to bytes, as it may be invalid UTF-8."""
    names = COLUMNS[table].split(", ")
    values = [f"CAST({table}.{n} AS BLOB)" if n in TEXT else f"{table}.{n}" for n in names]
    return f"seal_of({', '.join(values)})"


def _triggers(table: str) -> tuple[str, str]:
    """Return the triggers that maintain a table's checksums."""
    update = f"BEGIN UPDATE {table} SET seal = {_checksum_of(table)} WHERE rowid = new.rowid; END"
    return (
        f"CREATE TRIGGER {table}_added AFTER INSERT ON {table} {update}",
        f"CREATE TRIGGER {table}_changed AFTER UPDATE OF {COLUMNS[table]} ON {table} {update}",
    )


KIND = FileKind(
    purpose="keep the state of the run",
    repair="free the disk or correct its permissions, then continue with train --resume",
    application_id=0x434D5255,
    version=1,
    tables=(*TABLES, *(trigger for table in COLUMNS for trigger in _triggers(table))),
    synchronous="FULL",
)


WHY = "its checksum is that of another row"
REPAIR = "take run.sqlite from a copy of the run, or start a new run from one of its checkpoints"
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
    kept = AppendedLines(root)
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

"""Tables of `run.sqlite`, and the checksum of each row.

SQLite checks the structure of its pages, but not the contents of a row. Each row therefore has a
CRC-32 of its columns in the column `seal`, which triggers maintain and every reader compares. The
names on disk are those of version 1 and do not change. `rows` defines the Python values.
"""

from composer_mesh.actors.sqlite_file import FileKind

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
    repair="free the disk or correct its permissions, then go on with train --resume",
    application_id=0x434D5255,
    version=1,
    tables=(*TABLES, *(trigger for table in COLUMNS for trigger in _triggers(table))),
    synchronous="FULL",
)

"""Writer of `run.sqlite` and of the group files; each operation is one transaction.

Blocks until the data is on disk: `writing` calls it from its thread. Bodies are opaque bytes.

Repair of a run directory after a stop or a fault, before it is written again.

    drafts of files                                     removed: they were never used
    damaged rows                                        quarantined (`row_checksums`)
    files of groups without a finished row              quarantined: a stop between file and row
    damaged files of groups that wait for their step    quarantined; the group is sampled again

Files of trained groups are not read here: a replay reads them, and `composer-mesh verify` does.
"""

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.checkpoints.manifest import quarantine
from composer_mesh.actors.sqlite_file import SqliteFile, StoreError
from composer_mesh.rollouts.pairs import PreferencePair, pair_from_json, pair_to_json
from composer_mesh.rollouts.traces import Trace, TurnDivergences
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.store.group_files import (
    FOLDER,
    SUFFIX,
    group_of,
    path_of,
    read_group,
    write_group,
)
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import half_precision
from composer_mesh.services.store.rows import DamagedRecord, GroupRow, GroupState
from composer_mesh.services.store.schema import COLUMNS, KIND, WHY, set_rows_aside

UPSERT_GROUP = (
    "INSERT INTO groups (group_id, state, entered, finished_at, traces, bytes, crc) "
    "VALUES (:group_id, 'finished', :entered, :finished_at, :traces, :bytes, :crc) "
    "ON CONFLICT (group_id) DO UPDATE SET state = 'finished', finished_at = :finished_at, "
    "traces = :traces, bytes = :bytes, crc = :crc"
)
SUPERSEDE = (
    "UPDATE steps SET state = 'superseded' WHERE step >= ?",
    "UPDATE evaluations SET state = 'superseded' WHERE step > ?",
    "UPDATE groups SET state = 'finished', trained = NULL WHERE state = 'trained' AND trained > ?",
    "UPDATE groups SET state = 'in_flight', trained = NULL WHERE state = 'damaged' AND trained > ?",
    "UPDATE pairs SET state = 'waiting', step = NULL WHERE state IN ('trained', 'expired') "
    "AND step >= ?",
    "UPDATE rewards SET state = 'waiting', step = NULL WHERE state != 'waiting' AND step >= ?",
    "DELETE FROM divergences WHERE step >= ?",
)
FORGET_GROUP = (
    "UPDATE groups SET finished_at = NULL, traces = 0, bytes = 0, crc = 0, worded = NULL, "
    "state = iif(state = 'trained', 'damaged', 'in_flight') WHERE group_id = ?",
    "DELETE FROM traces WHERE group_id = ?",
    "DELETE FROM asked WHERE group_id = ?",
    "UPDATE pairs SET state = 'superseded' WHERE state = 'waiting' AND group_id = ?",
)


class RunRecords:
    """The only writer of a run's groups, pairs and steps; other processes may post rewards."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.file = SqliteFile(root / STORE_FILE, KIND)

    def close(self) -> None:
        self.file.close()

    def enter(self, group_id: int, version: int) -> None:
        """Record that a group enters the window, for the first time or again."""
        with self.file.transaction() as rows:
            rows.execute(
                "INSERT INTO groups (group_id, state, entered) VALUES (?, 'in_flight', ?) "
                "ON CONFLICT (group_id) DO UPDATE SET entered = excluded.entered "
                "WHERE state = 'in_flight'",
                (group_id, version),
            )

    def stored(self, group_id: int) -> list[Trace] | None:
        """Return the stored traces of a group, or None if it has none yet."""
        with self.file.reading() as rows:
            row = rows.execute(
                "SELECT bytes, crc, traces FROM groups WHERE group_id = ? AND state != 'in_flight'",
                (group_id,),
            ).fetchone()
        if row is None:
            return None
        return read_group(self._root, group_id, *row[:2]) if row[2] else []

    def add_group(self, group_id: int, traces: Sequence[Trace]) -> int:
        """Store a group's traces, the file first, then the rows; return the bytes of the file."""
        self.file.refuse_if_lost()
        try:
            size, crc = write_group(self._root, group_id, traces) if traces else (0, 0)
        except OSError as error:
            raise StoreError(str(self._root), KIND.purpose, str(error), KIND.repair) from None
        versions = [version for trace in traces for version in trace.versions()]
        values = {
            "group_id": group_id,
            "entered": min(versions, default=0),
            "finished_at": time.time(),
            "traces": len(traces),
            "bytes": size,
            "crc": crc,
        }
        with self.file.transaction() as rows:
            rows.execute(UPSERT_GROUP, values)
            self.index(group_id, traces)
        return size

    def index(self, group_id: int, traces: Sequence[Trace]) -> None:
        """Write the index rows of a group's traces."""
        insert = f"INSERT INTO traces ({COLUMNS['traces']}) VALUES ({', '.join('?' * 14)})"
        with self.file.transaction() as rows:
            rows.execute("DELETE FROM traces WHERE group_id = ?", (group_id,))
            rows.executemany(insert, [index_row(trace) for trace in traces])

    def add_worded(self, group_id: int, worded: bytes) -> None:
        with self.file.transaction() as rows:
            done = rows.execute(
                "UPDATE groups SET worded = ? WHERE group_id = ?", (worded, group_id)
            )
            _one(done, f"group {group_id} has not entered, so its hints cannot be kept")

    def add_teacher_queries(
        self, group_id: int | None, body: bytes, pairs: Sequence[PreferencePair]
    ) -> list[PreferencePair]:
        """Store the outcome of a group's teacher queries; return the pairs that are new."""
        insert = (
            "INSERT OR IGNORE INTO pairs (pair_id, group_id, version, body) VALUES (?, ?, ?, ?)"
        )
        fresh: list[PreferencePair] = []
        with self.file.transaction() as rows:
            if group_id is not None:
                rows.execute(
                    "INSERT OR IGNORE INTO asked (group_id, body) VALUES (?, ?)", (group_id, body)
                )
            for pair in pairs:
                values = (pair.pair_id, group_id, pair.rejected_version, pair_to_json(pair))
                if rows.execute(insert, values).rowcount:
                    fresh.append(pair)
        return fresh

    def take_pairs(self, step: int, max_age: int, limit: int) -> tuple[list[PreferencePair], int]:
        """Return the oldest waiting pairs up to `max_age`, and the number of older ones."""
        with self.file.reading() as rows:
            expired = rows.execute(
                "SELECT COUNT(*) FROM pairs WHERE state = 'waiting' AND ? - version > ?",
                (step, max_age),
            ).fetchone()[0]
            found = rows.execute(
                "SELECT body FROM pairs WHERE state = 'waiting' AND ? - version <= ? "
                "ORDER BY place LIMIT ?",
                (step, max_age, limit),
            ).fetchall()
        return [pair_from_json(body) for (body,) in found], int(expired)

    def plan_step(
        self,
        step: int,
        groups: Sequence[int],
        manifest: bytes,
        pairs: Sequence[str],
        max_age: int | None,
        rewards: Mapping[int, str],
    ) -> None:
        """Store the contents of a step before it is trained, in one transaction."""
        with self.file.transaction() as rows:
            rows.execute(
                "INSERT INTO steps (step, state, recipe) VALUES (?, 'planned', ?)", (step, manifest)
            )
            for group_id in groups:
                done = rows.execute(
                    "UPDATE groups SET state = 'trained', trained = ? "
                    "WHERE group_id = ? AND state = 'finished'",
                    (step + 1, group_id),
                )
                _one(done, f"group {group_id} is not finished, so step {step} cannot train it")
            for pair_id in pairs:
                done = rows.execute(
                    "UPDATE pairs SET state = 'trained', step = ? "
                    "WHERE pair_id = ? AND state = 'waiting'",
                    (step, pair_id),
                )
                _one(done, f"pair {pair_id} does not wait, so step {step} cannot train it")
            if max_age is not None:
                rows.execute(
                    "UPDATE pairs SET state = 'expired', step = ? "
                    "WHERE state = 'waiting' AND ? - version > ?",
                    (step, step, max_age),
                )
            rows.executemany(
                "UPDATE rewards SET state = ?, step = ? WHERE place = ?",
                [(str(state), step, place) for place, state in rewards.items()],
            )

    def end_step(self, step: int, metrics: bytes) -> bool:
        """Store the metrics of a planned step; return False, without change, if it has some."""
        with self.file.transaction() as rows:
            states = rows.execute(
                "SELECT state FROM steps WHERE step = ? AND state != 'superseded'", (step,)
            ).fetchall()
            if not states:
                raise ValueError(f"step {step} was not planned, so it has no metrics: plan it")
            done = rows.execute(
                "UPDATE steps SET state = 'done', metrics = ? WHERE step = ? AND state = 'planned'",
                (metrics, step),
            )
            return bool(done.rowcount)

    def supersede(self, step: int) -> None:
        """Supersede this step and later ones; their groups, pairs and rewards wait again."""
        with self.file.transaction() as rows:
            for statement in SUPERSEDE:
                rows.execute(statement, (step,))

    def forget_group(self, group_id: int) -> None:
        """Forget a group whose file is gone; it is sampled again, or damaged if it was trained."""
        with self.file.transaction() as rows:
            for statement in FORGET_GROUP:
                rows.execute(statement, (group_id,))

    def add_evaluation(self, step: int, body: bytes) -> None:
        with self.file.transaction() as rows:
            rows.execute("INSERT INTO evaluations (step, body) VALUES (?, ?)", (step, body))

    def add_poisoned(self, body: bytes) -> None:
        with self.file.transaction() as rows:
            rows.execute("INSERT INTO poisoned (body) VALUES (?)", (body,))

    def add_divergences(self, step: int, found: Sequence[TurnDivergences]) -> None:
        """Store what the SDPO channel saw at each token of a step's hinted turns, in 16 bits each.

        Only for people to look at: no part of a run reads it.
        """
        with self.file.transaction() as rows:
            rows.execute("DELETE FROM divergences WHERE step = ?", (step,))
            rows.executemany(
                "INSERT INTO divergences (step, trace_id, turn, body) VALUES (?, ?, ?, ?)",
                [(step, one.trace_id, one.turn, half_precision(one.values)) for one in found],
            )


def index_row(trace: Trace) -> tuple[object, ...]:
    """Return a trace's row for the table `traces`, in column order."""
    versions, every = trace.versions(), trace.trajectories()
    sampled = sum(one.action_tokens() for one in every)
    return (
        trace.trace_id,
        trace.group_id,
        trace.sample,
        trace.task,
        trace.split,
        trace.index,
        trace.reward,
        trace.success,
        len(trace.turns),
        sampled,
        sampled + sum(len(turn.context_ids) for one in every for turn in one.turns),
        json.dumps([site.error_kind for site in trace.error_sites]),
        min(versions, default=None),
        max(versions, default=None),
    )


def _one(done: sqlite3.Cursor, otherwise: str) -> None:
    if done.rowcount != 1:
        raise ValueError(otherwise)


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

"""A SQLite file that several processes of one machine share: made private, checked, locked.

Each change is one transaction that took the write lock at its start, so what it read cannot
change under it. Files of a network file system are not meant: SQLite's log needs shared memory.
What the tables hold is their owner's business.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BUSY_S = 30.0
"""How long a process waits for the others' transactions; each lasts milliseconds."""

# Closing any descriptor of a file gives up this process's locks on it, those of other
# connections too, so no file is made while another thread opens it.
_OPENING = threading.Lock()


class StoreError(Exception):
    """A file cannot do what it is for."""

    def __init__(self, path: str, purpose: str, reason: str, repair: str) -> None:
        super().__init__(path, purpose, reason, repair)

    def __str__(self) -> str:
        path, purpose, reason, repair = self.args
        return f"{path} cannot {purpose} ({reason}): {repair}"


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file is for, how it is recognised, and what to do where it cannot be used.

    FULL writes each transaction through to the disk; NORMAL may lose the last ones, but never
    the file, when the power fails.
    """

    purpose: str
    repair: str
    application_id: int
    version: int
    tables: tuple[str, ...]
    synchronous: Literal["FULL", "NORMAL"] = "NORMAL"


class SqliteFile:
    """Safe to use from several threads; None is a database in memory, for this object alone."""

    def __init__(self, path: Path | None, kind: FileKind) -> None:
        self._kind, self._lock = kind, threading.RLock()
        self._name = "the memory" if path is None else str(path)
        with self._errors_named():
            self._rows = _connected(path)
            try:
                self._prepare(in_memory=path is None)
            except BaseException:
                self._rows.close()
                raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, after waiting for other processes; joins one that this thread is in."""
        with self._lock, self._errors_named():
            if self._rows.in_transaction:
                yield self._rows
                return
            self._rows.execute("BEGIN IMMEDIATE")
            try:
                yield self._rows
                self._rows.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """For single statements that change nothing; waits for nobody."""
        with self._lock, self._errors_named():
            yield self._rows

    def close(self) -> None:
        with self._lock:
            self._rows.close()

    def error(self, reason: str) -> StoreError:
        """What is wrong with this file, with the repair."""
        return StoreError(self._name, self._kind.purpose, reason, self._kind.repair)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise self.error(str(error)) from None

    def _roll_back(self) -> None:
        if self._rows.in_transaction:  # some errors have ended it already
            self._rows.execute("ROLLBACK")

    def _prepare(self, in_memory: bool) -> None:
        with self.transaction() as rows:
            if _value(rows, "SELECT COUNT(*) FROM sqlite_master") == 0:
                self._make(rows)
        self._recognise(self._rows)
        if not in_memory:  # only now: a file of another kind is left as it is
            _write_ahead(self._rows)
            self._rows.execute(f"PRAGMA synchronous = {self._kind.synchronous}")

    def _make(self, rows: sqlite3.Connection) -> None:
        rows.execute(f"PRAGMA application_id = {self._kind.application_id}")
        rows.execute(f"PRAGMA user_version = {self._kind.version}")
        for table in self._kind.tables:
            rows.execute(table)

    def _recognise(self, rows: sqlite3.Connection) -> None:
        if _value(rows, "PRAGMA application_id") != self._kind.application_id:
            raise self.error("it is a database of another kind")
        version = _value(rows, "PRAGMA user_version")
        if version != self._kind.version:
            raise self.error(f"its version is {version}, not {self._kind.version}")
        if (found := _value(rows, "PRAGMA quick_check(1)")) != "ok":
            raise self.error(f"it is damaged: {found}")


def _connected(path: Path | None) -> sqlite3.Connection:
    """A connection without implicit transactions; a new file is readable by its owner only."""
    with _OPENING:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(path)
        return sqlite3.connect(
            ":memory:" if path is None else path,
            timeout=BUSY_S,
            isolation_level=None,
            check_same_thread=False,
        )


def _make_private(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return


def _write_ahead(rows: sqlite3.Connection) -> None:
    """Let readers go on beside a writer. SQLite does not wait for others here, so this does."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            rows.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.01)


def _value(rows: sqlite3.Connection, statement: str) -> object:
    return rows.execute(statement).fetchone()[0]

"""A SQLite file that several processes of one machine share: made private, checked, locked.

Each change is one transaction that took the write lock at its start, so what it read cannot
change under it. Files of a network file system are not meant: SQLite's log needs shared memory.
What the tables hold is their owner's business.
"""

import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    the file, when the power fails. `migrations` has, by version, what makes a file of it one of
    the next.
    """

    purpose: str
    repair: str
    application_id: int
    version: int
    tables: tuple[str, ...]
    synchronous: Literal["FULL", "NORMAL"] = "NORMAL"
    migrations: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


class SqliteFile:
    """Safe to use from several threads; None is a database in memory, for this object alone.

    A file that is opened `read_only` must be there, of this version, and is left as it is.
    """

    def __init__(self, path: Path | None, kind: FileKind, read_only: bool = False) -> None:
        self._kind, self._lock = kind, threading.RLock()
        self._name = "the memory" if path is None else str(path)
        with self._errors_named():
            self._rows = _reading(path) if read_only and path else _connected(path)
            try:
                if read_only:
                    self._recognise()
                else:
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
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            raise self.error(str(error)) from None

    def _roll_back(self) -> None:
        if self._rows.in_transaction:  # some errors have ended it already
            self._rows.execute("ROLLBACK")

    def check(self) -> None:
        """Raise StoreError where the file's structure is damaged. Reads all of it."""
        with self.reading() as rows:
            found = _value(rows, "PRAGMA quick_check(1)")
        if found != "ok":
            raise self.error(f"it is damaged: {found}")

    def _prepare(self, in_memory: bool) -> None:
        with self.transaction() as rows:
            if _value(rows, "SELECT COUNT(*) FROM sqlite_master") == 0:
                self._make(rows)
        if self._version() < self._kind.version:
            self._migrate()
        self._recognise()
        self.check()
        if not in_memory:  # only now: a file of another kind is left as it is
            _write_ahead(self._rows)
            self._rows.execute(f"PRAGMA synchronous = {self._kind.synchronous}")

    def _make(self, rows: sqlite3.Connection) -> None:
        rows.execute(f"PRAGMA application_id = {self._kind.application_id}")
        rows.execute(f"PRAGMA user_version = {self._kind.version}")
        for table in self._kind.tables:
            rows.execute(table)

    def _migrate(self) -> None:
        """Bring an older file to this version, step by step: all the way, or not at all."""
        with self.transaction() as rows:
            for version in range(self._version(), self._kind.version):
                for statement in self._kind.migrations.get(version, ()):
                    rows.execute(statement)
                if version in self._kind.migrations:
                    rows.execute(f"PRAGMA user_version = {version + 1}")

    def _version(self) -> int:
        """The version of the file; raises StoreError where it is of another kind."""
        if _value(self._rows, "PRAGMA application_id") != self._kind.application_id:
            raise self.error("it is a database of another kind")
        return int(_value(self._rows, "PRAGMA user_version"))

    def _recognise(self) -> None:
        if (version := self._version()) != self._kind.version:
            raise self.error(f"its version is {version}, not {self._kind.version}")


def _connected(path: Path | None) -> sqlite3.Connection:
    """A connection without implicit transactions; a new file is readable by its owner only."""
    with _OPENING:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(path)
        return _opened(":memory:" if path is None else path.absolute().as_uri())


def _reading(path: Path) -> sqlite3.Connection:
    """A connection that changes nothing, beside the writers of the file."""
    place = f"{path.absolute().as_uri()}?mode=ro"
    rows = _opened(place)
    try:
        rows.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:  # beside a log it needs a file of its own, or no log
        rows.close()
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise
        rows = _opened(f"{place}&immutable=1")
    return rows


def _opened(place: str) -> sqlite3.Connection:
    rows = sqlite3.connect(
        place, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True
    )
    rows.create_function("seal_of", -1, checksum_of, deterministic=True)
    rows.text_factory = _text
    return rows


def _text(value: bytes) -> str:
    """A text of which no byte is lost, also where a damaged one is no UTF-8."""
    return value.decode("utf-8", "surrogateescape")


def checksum_of(*values: object) -> int:
    """The CRC-32 of a row's values; in SQL it is the function `seal_of`."""
    crc = 0
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(content, zlib.crc32(b"%d," % len(content), crc))
    return crc


def damage_of(path: Path) -> str:
    """What is wrong with the structure of a SQLite file, whatever it holds; empty where nothing."""
    try:
        with closing(_reading(path)) as rows:
            found = str(_value(rows, "PRAGMA integrity_check(1)"))
    except (sqlite3.Error, UnicodeDecodeError) as error:  # damaged text may be quoted in an error
        return str(error)
    return "" if found == "ok" else found


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


def _value(rows: sqlite3.Connection, statement: str) -> Any:
    return rows.execute(statement).fetchone()[0]

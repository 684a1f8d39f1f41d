"""A SQLite file that several processes of one machine share: private, checked, locked.

Each change is one transaction that takes the write lock at its start, so the data it read cannot
change meanwhile. Network file systems are not supported: SQLite's log needs shared memory.
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
"""Seconds a process waits for others' transactions; each lasts milliseconds."""

# Closing any descriptor of a file releases all this process's locks on it, also those of other
# connections, so no file is created while another thread opens it.
_OPENING = threading.Lock()


class StoreError(Exception):
    """A file cannot be used for its purpose."""

    def __init__(self, path: str, purpose: str, reason: str, repair: str) -> None:
        super().__init__(path, purpose, reason, repair)

    def __str__(self) -> str:
        path, purpose, reason, repair = self.args
        return f"{path} cannot {purpose} ({reason}): {repair}"


@dataclass(frozen=True, slots=True)
class FileKind:
    """The purpose of a file, its identification, and the repair if it cannot be used.

    FULL syncs each transaction to disk; NORMAL may lose the last ones, but never the file, on a
    power failure. `migrations` maps a version to the statements that upgrade a file to the next
    one.
    """

    purpose: str
    repair: str
    application_id: int
    version: int
    tables: tuple[str, ...]
    synchronous: Literal["FULL", "NORMAL"] = "NORMAL"
    migrations: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


class SqliteFile:
    """A SQLite connection for several threads; the path None is a private in-memory database.

    A file opened `read_only` must exist, have this version, and is not changed.
    """

    def __init__(self, path: Path | None, kind: FileKind, read_only: bool = False) -> None:
        self._kind, self._lock = kind, threading.RLock()
        self._name = "the memory" if path is None else str(path)
        self._path = None if path is None else path.absolute()
        self._opened_as: tuple[int, int] | None = None
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
        """Run an atomic transaction; waits for other processes; joins this thread's open one."""
        with self._lock, self._errors_named():
            if self._rows.in_transaction:
                yield self._rows
                return
            self._refuse_a_lost_file()
            self._rows.execute("BEGIN IMMEDIATE")
            try:
                yield self._rows
                self._rows.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for single read-only statements; waits for no other process."""
        with self._lock, self._errors_named():
            yield self._rows

    def close(self) -> None:
        with self._lock:
            self._rows.close()

    def refuse_if_lost(self) -> None:
        """Raise StoreError if the file was removed or replaced, where SQLite would write on."""
        with self._errors_named():
            self._refuse_a_lost_file()

    def _refuse_a_lost_file(self) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
        except FileNotFoundError:
            raise self.error("it was removed while in use") from None
        self._opened_as = self._opened_as or (found.st_dev, found.st_ino)
        if (found.st_dev, found.st_ino) != self._opened_as:
            raise self.error("it was replaced while in use")

    def error(self, reason: str) -> StoreError:
        """Return the error for a problem with this file, with the repair."""
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
        """Raise StoreError if the file's structure is damaged. Reads the complete file."""
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
        if not in_memory:  # only now: a file of another kind stays unmodified
            _write_ahead(self._rows)
            self._rows.execute(f"PRAGMA synchronous = {self._kind.synchronous}")

    def _make(self, rows: sqlite3.Connection) -> None:
        rows.execute(f"PRAGMA application_id = {self._kind.application_id}")
        rows.execute(f"PRAGMA user_version = {self._kind.version}")
        for table in self._kind.tables:
            rows.execute(table)

    def _migrate(self) -> None:
        """Upgrade an older file to this version, step by step, in one transaction."""
        with self.transaction() as rows:
            for version in range(self._version(), self._kind.version):
                for statement in self._kind.migrations.get(version, ()):
                    rows.execute(statement)
                if version in self._kind.migrations:
                    rows.execute(f"PRAGMA user_version = {version + 1}")

    def _version(self) -> int:
        """Return the version of the file; raises StoreError for a file of another kind."""
        if _value(self._rows, "PRAGMA application_id") != self._kind.application_id:
            raise self.error("it is a database of another kind")
        return int(_value(self._rows, "PRAGMA user_version"))

    def _recognise(self) -> None:
        if (version := self._version()) != self._kind.version:
            raise self.error(f"its version is {version}, not {self._kind.version}")


def _connected(path: Path | None) -> sqlite3.Connection:
    """Return a connection without implicit transactions; a new file is private to its owner."""
    with _OPENING:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(path)
        return _opened(":memory:" if path is None else path.absolute().as_uri())


def _reading(path: Path) -> sqlite3.Connection:
    """Return a read-only connection, usable concurrently with writers of the file."""
    place = f"{path.absolute().as_uri()}?mode=ro"
    rows = _opened(place)
    try:
        rows.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:  # reading with a log needs a -shm file
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
    """Decode text without loss, even if a damaged value is not UTF-8."""
    return value.decode("utf-8", "surrogateescape")


def checksum_of(*values: object) -> int:
    """Return the CRC-32 of a row's values; in SQL it is the function `seal_of`."""
    crc = 0
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode()
        crc = zlib.crc32(content, zlib.crc32(b"%d," % len(content), crc))
    return crc


def damage_of(path: Path) -> str:
    """Return structural damage of any SQLite file; empty if there is none."""
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
    """Enable WAL, so that readers do not block a writer; retries while the file is busy."""
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

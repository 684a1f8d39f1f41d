"""A SQLite file that several processes of one machine share: private, checked, locked.

Each change is one transaction that takes the write lock at its start, so the data it read cannot
change meanwhile. Network file systems are not supported: SQLite's log needs shared memory.

A file may have been made by a stranger. Before a row is read, its schema must be the one that this
program creates: views, further triggers and computed columns would run their maker's SQL. What a
reader's statements may cost is bounded by the size of the file (`WorkLimit`).

`GroupCommit` runs transactions in a thread, many in one commit: a commit waits for the disk, and
what is requested meanwhile is in the next one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.open_folder import link_refused
from composer_mesh.mesh.untrusted_json import MIB, refuse_unusual

BUSY_S = 30.0
"""Seconds a process waits for others' transactions; each lasts milliseconds."""

FILE_SUFFIXES = ("", "-journal", "-wal", "-shm")
"""Suffixes of a database and of the files that SQLite opens with it."""
LONGEST_VALUE = 256 * MIB
OBJECTS = ("table", "index", "view", "trigger")
OTHER_SCHEMA = "its tables are not those that were made"
TAKE_A_COPY = "take it from a copy, or use another file"

# Closing any descriptor of a file releases all this process's locks on it, also those of other
# connections, so no file is created while another thread opens it.
_OPENING = threading.Lock()


class StoreError(Worded, Exception):
    """A file cannot be used: its path, its purpose, the reason and the repair."""

    message = "{0} cannot {1} ({2}): {3}"

    @property
    def reason(self) -> str:
        """What is wrong, without the file and the repair."""
        return str(self.args[2])


@dataclass(frozen=True, slots=True)
class FileKind:
    """The purpose of a file, its identification, and the repair if it cannot be used.

    FULL syncs each transaction to disk; NORMAL may lose the last ones, but never the file, on a
    power failure.
    """

    purpose: str
    repair: str
    application_id: int
    version: int
    tables: tuple[str, ...]
    synchronous: Literal["FULL", "NORMAL"] = "NORMAL"


class WorkLimit:
    """Interrupts a connection whose statements do more than any intact file of that size needs.

    The pages of a crafted file of some kilobytes can refer to each other so that it seems to hold
    more rows than could ever be read. `start` begins a new allowance.
    """

    EVERY = 1000
    STEPS, STEPS_PER_BYTE = 2_000_000, 64
    CPU_S, CPU_S_PER_BYTE = 20.0, 1e-6

    def __init__(self, rows: sqlite3.Connection, path: Path) -> None:
        self._files = [path, path.with_name(f"{path.name}-wal")]
        self._steps, self._until, self.exceeded = 0.0, 0.0, False
        self.start()
        rows.set_progress_handler(self._step, self.EVERY)

    def start(self) -> None:
        size = sum(file.stat().st_size for file in self._files if file.is_file())
        self._steps = self.STEPS + self.STEPS_PER_BYTE * size
        self._until = time.thread_time() + self.CPU_S + self.CPU_S_PER_BYTE * size
        self.exceeded = False

    def _step(self) -> int:
        self._steps -= self.EVERY
        self.exceeded = self._steps < 0 or time.thread_time() > self._until
        return int(self.exceeded)


class SqliteFile:
    """A SQLite connection for several threads; the path None is a private in-memory database.

    A file opened `read_only` must exist, have this version, and is not changed.
    """

    def __init__(self, path: Path | None, kind: FileKind, read_only: bool = False) -> None:
        self._kind, self._lock = kind, threading.RLock()
        self._name = "the memory" if path is None else str(path)
        self._effort: WorkLimit | None = None
        self._path = None if path is None else path.absolute()
        self._opened_as: tuple[int, int] | None = None
        with self._errors_named():
            self._rows = _reading(path) if read_only and path else _connected(path)
            try:
                self._effort = None if path is None else WorkLimit(self._rows, path)
                if read_only:
                    self._recognise()
                else:
                    self._prepare(in_memory=path is None)
                    self._trust()
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
            if self._effort is not None:
                self._effort.start()
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
            raise self.error(_reason(error, self._effort)) from None

    def _trust(self) -> None:
        """Let a file whose schema and pages were checked run its own triggers, without bounds."""
        self._rows.execute("PRAGMA trusted_schema = ON")
        self._rows.set_progress_handler(None, 0)
        self._effort = None

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

    def _version(self) -> int:
        """Return the version of the file; raises StoreError for a file of another kind."""
        if _value(self._rows, "PRAGMA application_id") != self._kind.application_id:
            raise self.error("it is a database of another kind")
        return int(_value(self._rows, "PRAGMA user_version"))

    def _recognise(self) -> None:
        if (version := self._version()) != self._kind.version:
            raise self.error(f"its version is {version}, not {self._kind.version}")
        select = "SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL"
        found = Counter(sql for kind, sql in self._rows.execute(select) if kind in OBJECTS)
        if found != Counter(self._kind.tables):
            raise StoreError(self._name, self._kind.purpose, OTHER_SCHEMA, TAKE_A_COPY)


def _connected(path: Path | None) -> sqlite3.Connection:
    """Return a connection without implicit transactions; a new file is private to its owner."""
    with _OPENING:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_unusual(path)
            _refuse_links(path)
            _make_private(path)
        return _opened(":memory:" if path is None else path.absolute().as_uri())


def _reading(path: Path) -> sqlite3.Connection:
    """Return a read-only connection, usable concurrently with writers of the file."""
    _refuse_unusual(path)
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
    rows.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    rows.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    rows.execute("PRAGMA trusted_schema = OFF")
    rows.execute("PRAGMA cell_size_check = ON")
    rows.create_function("seal_of", -1, checksum_of, deterministic=True)
    rows.text_factory = _text
    return rows


def _refuse_unusual(path: Path) -> None:
    for suffix in FILE_SUFFIXES:
        refuse_unusual(path.with_name(f"{path.name}{suffix}"))


def _refuse_links(path: Path) -> None:
    """Refuse a file that is written where it leads to; SQLite opens by path, and follows links."""
    for suffix in FILE_SUFFIXES:
        if (one := path.with_name(f"{path.name}{suffix}")).is_symlink():
            raise link_refused(one)


def _reason(error: Exception, effort: WorkLimit | None) -> str:
    if effort is not None and effort.exceeded:
        return "reading it takes more steps than an intact file of its size needs"
    return str(error)


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
    effort = None
    try:
        with closing(_reading(path)) as rows:
            effort = WorkLimit(rows, path)
            # A stranger's file may have expressions of its own, which integrity_check computes.
            rows.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(MIB, path.stat().st_size))
            rows.execute("PRAGMA ignore_check_constraints = ON")
            found = str(_value(rows, "PRAGMA integrity_check(1)"))
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:  # it may quote damaged text
        return _reason(error, effort)
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


T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]
Waiting = tuple[Job, "asyncio.Future[Any]"]
MOST = 256
"""Jobs of one commit."""


class GroupCommit:
    """Jobs on a file's connection; each is undone alone where it raises.

    A job's result, or its error, reaches its caller after the commit that it is part of.
    """

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Waiting | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="group-commit", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job after the earlier ones. Waits until it is on disk; it runs if cancelled too."""
        return await asyncio.shield(self.start(job))

    async def repeat(self, job: Callable[[sqlite3.Connection], int]) -> None:
        """Run a job until it returns 0, each time in a transaction of its own, among others."""
        while await self.run(job):
            pass

    def start(self, job: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Queue a job behind those that were queued before; its result comes when it is on disk."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """Wait for all jobs; takes no more."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            together, ends = [first], False
            while len(together) < MOST and not self._jobs.empty():
                following = self._jobs.get()
                if following is None:
                    ends = True
                    break
                together.append(following)
            self._tell(self._commit(together))
            if ends:
                return

    def _commit(self, jobs: list[Waiting]) -> list[tuple[Waiting, Any, BaseException | None]]:
        try:
            with self._file.transaction() as rows:
                return [(one, *_tried(rows, one[0])) for one in jobs]
        except Exception as error:  # noqa: BLE001  the waiting callers get it
            return [(one, None, error) for one in jobs]

    def _tell(self, outcomes: list[tuple[Waiting, Any, BaseException | None]]) -> None:
        def settle() -> None:
            for (_, done), result, error in outcomes:
                if done.done():
                    continue
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)


def _tried(rows: sqlite3.Connection, job: Job) -> tuple[Any, BaseException | None]:
    rows.execute("SAVEPOINT job")
    try:
        result = job(rows)
    except Exception as error:  # noqa: BLE001  the waiting caller gets it
        rows.execute("ROLLBACK TO job")
        rows.execute("RELEASE job")
        return None, error
    rows.execute("RELEASE job")
    return result, None

"""The process that keeps Monarch's telemetry of a run and answers queries about it.

    processes of the run  -- Arrow frames -->  ingest.sock   Monarch's tables, in memory
    composer-mesh query   -- one line of JSON -->  query.sock    `answer`, read-only

Both are Unix sockets in a folder that only the run's owner can enter; there is no network listener,
and Monarch's own HTTP server is not started. The arguments are that folder and the process with
which this one ends.

A statement runs in an SQLite database in memory that holds copies of the tables it names. SQLite
asks an authorizer about every part of a statement: what is not a read of those tables is refused,
whatever its syntax.

Answers one SQL query about telemetry tables, which it can only read, within limits.

The statement runs in an SQLite database in memory that holds copies of the tables it names. SQLite
asks an authorizer about every part of a statement: what is not a read of those tables is refused,
whatever its syntax. Nothing here knows Monarch or sockets.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from composer_mesh.mesh.connection_guard import guard_connections
from composer_mesh.mesh.monarch_log import open_in_logs, open_log

Value: TypeAlias = "int | float | str | bytes | None"

LONGEST_STATEMENT = 65_536
CATALOG = frozenset({"sqlite_master", "sqlite_schema"})
"""SQLite's own table of tables and their columns."""
ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION})
LARGEST_INTEGER = (1 << 63) - 1
OPERATIONS = 10_000
"""Operations of SQLite between two looks at the clock."""


class QueryRefused(ValueError):
    """A statement is not answered: why, with the bound and the repair."""


class Tables(Protocol):
    """The tables that a query may read."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Names of the columns of each table."""

    def rows(self, table: str, at_most: int) -> Iterable[Sequence[Any]]:
        """Return rows of a table, at most so many."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one query: time, rows of a table that it reads, rows and bytes of its result."""

    seconds: float = 10.0
    table_rows: int = 500_000
    rows: int = 10_000
    value_bytes: int = 1 << 18
    memory_bytes: int = 512 << 20


@dataclass(frozen=True)
class Answer:
    """Rows as objects; `more` tells that the result was longer."""

    rows: list[dict[str, Any]]
    more: bool


def answer(
    sql: str,
    tables: Tables,
    limits: Limits = Limits(),
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Run one SELECT; raises `QueryRefused` for anything else, and at a limit."""
    if len(sql) > LONGEST_STATEMENT:
        raise QueryRefused(
            f"the statement has {len(sql)} characters, and at most {LONGEST_STATEMENT} are read"
        )
    end = clock() + limits.seconds
    database = sqlite3.connect(":memory:")
    try:
        database.execute(f"PRAGMA hard_heap_limit = {limits.memory_bytes}")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.value_bytes)
        database.set_progress_handler(lambda: clock() > end, OPERATIONS)
        return _answer(database, sql, tables, limits)
    except MemoryError:
        raise QueryRefused(f"it needs more than {limits.memory_bytes >> 20} MiB") from None
    except sqlite3.Error as error:
        why = f"more than {limits.seconds:g} s" if clock() > end else str(error)
        raise QueryRefused(why) from None
    finally:
        database.close()


def _answer(database: sqlite3.Connection, sql: str, tables: Tables, limits: Limits) -> Answer:
    for name, columns in tables.columns.items():
        database.execute(f"CREATE TABLE {_quoted(name)} ({', '.join(map(_quoted, columns))})")
    reader = _Reader(frozenset(tables.columns))
    database.set_authorizer(reader)
    database.execute(f"EXPLAIN {sql}")  # compiled, not run: it names its tables
    database.set_authorizer(None)
    if not reader.selects:
        raise QueryRefused("it is no SELECT, and nothing else is answered")
    for name in sorted(reader.named):
        _load(database, name, tables, limits.table_rows)
    database.set_authorizer(reader)
    return _result(database.execute(sql), limits.rows)


class _Reader:
    """Allows reads of known tables, and notes which; denies everything else."""

    def __init__(self, tables: frozenset[str]) -> None:
        self._tables = tables
        self.named: set[str] = set()
        self.selects = False

    def __call__(self, action: int, subject: str | None, *_: str | None) -> int:
        if action not in ALLOWED:
            return sqlite3.SQLITE_DENY
        self.selects = self.selects or action == sqlite3.SQLITE_SELECT
        if action == sqlite3.SQLITE_READ and subject in self._tables:
            self.named.add(subject)
        elif action == sqlite3.SQLITE_READ and subject not in CATALOG:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK


def _load(database: sqlite3.Connection, name: str, tables: Tables, most: int) -> None:
    marks = ", ".join("?" for _ in tables.columns[name])
    insert = f"INSERT INTO {_quoted(name)} VALUES ({marks})"
    database.executemany(insert, _bounded(name, tables.rows(name, most + 1), most))


def _bounded(name: str, rows: Iterable[Sequence[Any]], most: int) -> Iterator[list[Value]]:
    for number, row in enumerate(rows):
        if number == most:
            raise QueryRefused(
                f"table {name} has more than {most} rows by now, and no query reads more"
            )
        yield [_stored(value) for value in row]


def _stored(value: Any) -> Value:
    """Return a value as SQLite can hold it: nested ones, and integers above 64 bits, as text."""
    if isinstance(value, int) and not -LARGEST_INTEGER <= value <= LARGEST_INTEGER:
        return str(value)
    return value if isinstance(value, int | float | str | bytes | None) else str(value)


def _result(cursor: sqlite3.Cursor, most: int) -> Answer:
    found = cursor.fetchmany(most + 1)
    names = [column[0] for column in cursor.description or ()]
    rows = [dict(zip(names, map(_shown, row), strict=True)) for row in found[:most]]
    return Answer(rows, len(found) > most)


def _shown(value: Value) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


INGEST, QUERY, LOG = "ingest.sock", "query.sock", "store.log"
RETENTION_S = 3600
LOOK_S = 0.25
REQUEST_S = 5.0
"""How long a client may take to send its request."""


class MonarchTables:
    """Monarch's telemetry tables of this process, filled from the ingest socket."""

    def __init__(self, ingest: Path) -> None:
        # Imported here: it takes seconds, and the tests of the server need none of it.
        from monarch.distributed_telemetry.engine import QueryEngine

        from composer_mesh.mesh.telemetry_collector import collect

        collector = collect(ingest, RETENTION_S)
        self._engine = QueryEngine(collector)
        names = collector.table_names.call_one().get()
        self.columns: Mapping[str, Sequence[str]] = {name: self._names(name) for name in names}

    def _names(self, table: str) -> list[str]:
        return list(self._engine.query(f'SELECT * FROM "{table}" LIMIT 0').schema.names)

    def rows(self, table: str, at_most: int) -> Iterator[Sequence[Any]]:
        """Yield rows of one of Monarch's tables; the statement is never a client's."""
        if table not in self.columns:
            raise KeyError(table)
        found = self._engine.query(f'SELECT * FROM "{table}" LIMIT {at_most}')
        for batch in found.to_batches(max_chunksize=1000):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class QueryServer(socketserver.UnixStreamServer):
    """Answers one request at a time, in order, over a socket of this user with mode 0600."""

    def __init__(self, path: Path, tables: Tables) -> None:
        self.tables = tables
        super().__init__(str(path), _Request)

    def server_bind(self) -> None:
        os.fchmod(self.socket.fileno(), 0o600)  # the file is created with this mode
        super().server_bind()
        Path(str(self.server_address)).chmod(0o600)

    def handle_error(self, *_: object) -> None:
        """Log an error and go on: a client that disconnects ends nothing."""
        sys.stderr.write(f"a query was not answered: {sys.exception()!r}\n")


class _Request(socketserver.StreamRequestHandler):
    timeout = REQUEST_S
    server: QueryServer

    def handle(self) -> None:
        line = self.rfile.readline(4 * LONGEST_STATEMENT)
        if not line:  # a client that only looked whether this process answers
            return
        self.wfile.write(json.dumps(reply(line, self.server.tables)).encode() + b"\n")


def reply(line: bytes, tables: Tables) -> dict[str, Any]:
    """Return the reply to one request line: rows, or why it is refused."""
    try:
        request = json.loads(line)
        sql = request["sql"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"refused": "a request is one line with a JSON object that has a text named sql"}
    if not isinstance(sql, str):
        return {"refused": f"sql is a {type(sql).__name__} but must be a text"}
    try:
        found = answer(sql, tables)
    except QueryRefused as error:
        return {"refused": str(error)}
    return {"rows": found.rows, "more": found.more}


def end_with(parent: int) -> None:
    """Exit once this process is no longer a child of `parent`."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(0)


def write_to(log: Path) -> None:
    """Write what this process prints to a file, in place of the terminal of the run."""
    file = open_in_logs(log)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.close(file)


def serve(folder: Path) -> None:
    """Keep the tables and answer queries until this process is ended."""
    open_log("telemetry")
    guard_connections()
    tables = MonarchTables(folder / INGEST)
    with QueryServer(folder / QUERY, tables) as server:
        server.serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_to(Path(sys.argv[1]) / LOG)
    threading.Thread(target=end_with, args=[int(sys.argv[2])], daemon=True).start()
    serve(Path(sys.argv[1]))

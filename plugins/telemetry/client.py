"""SQL over the telemetry of a run: copies of the tables that a query names, in this process.

The store hands out tables over its Unix socket; the SELECT runs here, in an SQLite database in
memory. SQLite asks an authorizer about every part of a statement: what is not a read of those
tables is refused, whatever its syntax. Does not import Monarch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_mesh.mesh.tcp_peer import is_own_user

STORE_S, QUERY_S = 60.0, 10.0
"""Seconds that the store may take to send a table, and a query to run."""
LONGEST_REPLY = 1 << 30
CATALOG = frozenset({"sqlite_master", "sqlite_schema"})
"""SQLite's own table of tables and their columns."""
ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION})
OPERATIONS = 10_000
"""Operations of SQLite between two looks at the clock."""


class StoreUnreachable(ConnectionError):
    """The store of a run does not answer."""


class QueryRefused(ValueError):
    """A statement is not answered; the message says why."""


def query(store: Path, sql: str, seconds: float = QUERY_S) -> list[dict[str, Any]]:
    """Run one SELECT; raises `StoreUnreachable`, or `QueryRefused` for anything else."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        try:
            reader = _load(database, store, sql)
        except sqlite3.Error as error:
            raise QueryRefused(str(error)) from None
        end = time.monotonic() + seconds
        database.set_progress_handler(lambda: time.monotonic() > end, OPERATIONS)
        database.set_authorizer(reader)
        try:
            found = database.execute(sql)
            names = [column[0] for column in found.description]
            return [dict(zip(names, map(_shown, row), strict=True)) for row in found]
        except sqlite3.Error as error:
            late = time.monotonic() > end
            raise QueryRefused(f"more than {seconds:g} s" if late else str(error)) from None


def _load(database: sqlite3.Connection, store: Path, sql: str) -> _Reader:
    """Copy the tables that a statement names; return the authorizer that lets it read them."""
    tables: dict[str, list[str]] = ask(store, None)["columns"]
    for name, columns in tables.items():
        database.execute(f"CREATE TABLE {_quoted(name)} ({', '.join(map(_quoted, columns))})")
    reader = _Reader(frozenset(tables))
    database.set_authorizer(reader)
    database.execute(f"EXPLAIN {sql}")  # compiled, not run: it names its tables
    database.set_authorizer(None)
    if not reader.selects:
        raise QueryRefused("it is not a SELECT, and nothing else is answered")
    for name in sorted(reader.named):
        reply = ask(store, name)
        if "rows" not in reply:
            raise QueryRefused(str(reply.get("refused")))
        marks = ", ".join("?" for _ in tables[name])
        database.executemany(f"INSERT INTO {_quoted(name)} VALUES ({marks})", reply["rows"])
    return reader


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


def _shown(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def ask(store: Path, table: str | None) -> dict[str, Any]:
    """Return the store's reply about a table: `rows`; None asks for the `columns` of all."""
    try:
        with connected(store) as connection:
            connection.sendall(json.dumps(table).encode() + b"\n")
            with connection.makefile("rb") as answer:
                reply: dict[str, Any] = json.loads(answer.readline(LONGEST_REPLY))
    except (OSError, ValueError) as error:
        raise StoreUnreachable(f"{store} does not answer ({error}): has the run ended?") from error
    return reply


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Connect to a store of this user; closed after the block. Raises `StoreUnreachable`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(STORE_S)
        connection.connect(str(path))
        if not is_own_user(connection):
            raise StoreUnreachable(f"{path} belongs to another user: ask for a run of your own")
        yield connection

"""Answers one SQL query about telemetry tables, which it can only read, within limits.

The statement runs in an SQLite database in memory that holds copies of the tables it names. SQLite
asks an authorizer about every part of a statement: what is not a read of those tables is refused,
whatever its syntax. Nothing here knows Monarch or sockets.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

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
        ...

    def rows(self, table: str, at_most: int) -> Iterable[Sequence[Any]]:
        """Return rows of a table, at most so many."""
        ...


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

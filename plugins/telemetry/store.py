"""The process that keeps Monarch's telemetry of a run and hands out its tables.

    processes of the run  -- Arrow frames -->  ingest.sock   Monarch's tables, in memory
    composer-mesh query   -- a table's name -->  query.sock    its rows, as one line of JSON

Both are Unix sockets in a folder that only the run's owner can enter; there is no network listener,
and Monarch's own HTTP server is not started. The arguments are that folder and the process with
which this one ends. No statement of a client runs here: `telemetry_client` does that.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.mesh.connection_guard import guard_connections
from composer_mesh.mesh.hosts.process_lifetime import exit_after
from composer_mesh.mesh.monarch_log import open_in_logs, open_log

LONGEST_REQUEST = 4096
TABLE_ROWS = 500_000
LARGEST_INTEGER = (1 << 63) - 1


class Tables(Protocol):
    """The tables that are handed out."""

    @property
    def columns(self) -> Mapping[str, Sequence[str]]:
        """Names of the columns of each table."""

    def rows(self, table: str, at_most: int) -> Iterable[Sequence[Any]]:
        """Return rows of a table, at most so many."""


def reply(line: bytes, tables: Tables, most: int = TABLE_ROWS) -> dict[str, Any]:
    """Return the reply to one request line: rows, the columns of all tables, or why none."""
    try:
        name = json.loads(line)
    except (ValueError, RecursionError):
        name = ()
    if name is None:
        return {"columns": {table: list(names) for table, names in tables.columns.items()}}
    if not isinstance(name, str) or name not in tables.columns:
        return {"refused": "a request is one line of JSON: the name of a table, or null"}
    rows = [[_plain(value) for value in row] for row in tables.rows(name, most + 1)]
    if len(rows) > most:
        return {
            "refused": f"table {name} has more than {most} rows by now, and no query reads more"
        }
    return {"rows": rows}


def _plain(value: Any) -> int | float | str | None:
    """Return a value as JSON and SQLite can hold it: others, and large integers, as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, int) and not -LARGEST_INTEGER <= value <= LARGEST_INTEGER:
        return str(value)
    return value if isinstance(value, int | float | str | None) else str(value)


INGEST, QUERY, LOG = "ingest.sock", "query.sock", "store.log"
RETENTION_S = 3600
REQUEST_S, REPLY_S = 5.0, 60.0
"""How long a client may take to send its request, and to read the reply."""


class MonarchTables:
    """Monarch's telemetry tables of this process, filled from the ingest socket."""

    def __init__(self, ingest: Path) -> None:
        # Imported here: it takes seconds, and the tests of the server need none of it.
        from monarch.distributed_telemetry.engine import QueryEngine

        from composer_mesh.plugins.telemetry.collector import collect

        collector = collect(ingest, RETENTION_S)
        self._engine = QueryEngine(collector)
        names = collector.table_names.call_one().get()
        self.columns: Mapping[str, Sequence[str]] = {name: self._names(name) for name in names}

    def _names(self, table: str) -> list[str]:
        return list(self._engine.query(f'SELECT * FROM "{table}" LIMIT 0').schema.names)

    def rows(self, table: str, at_most: int) -> Iterator[Sequence[Any]]:
        """Yield rows of one of Monarch's tables; the statement is never a client's."""
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
        """Log an error and continue: a client that disconnects ends nothing."""
        sys.stderr.write(f"a request was not answered: {sys.exception()!r}\n")


class _Request(socketserver.StreamRequestHandler):
    timeout = REQUEST_S
    server: QueryServer

    def handle(self) -> None:
        line = self.rfile.readline(LONGEST_REQUEST)
        if not line:  # a client that only looked whether this process answers
            return
        self.connection.settimeout(REPLY_S)
        self.wfile.write(json.dumps(reply(line, self.server.tables)).encode() + b"\n")


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
    threading.Thread(target=exit_after, args=[int(sys.argv[2]), 0], daemon=True).start()
    serve(Path(sys.argv[1]))

"""A telemetry store answers its owner; a query reads its tables, within limits, and no more."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from telemetry_stores import served

from composer_mesh.plugins.telemetry.client import QueryRefused, StoreUnreachable, ask, query
from composer_mesh.plugins.telemetry.store import reply


class TablesOfATest:
    """Two tables, of which `spans` is long; notes which were read."""

    def __init__(self) -> None:
        self.columns: Mapping[str, Sequence[str]] = {
            "actors": ["id", "full_name"],
            "spans": ["id"],
            'odd "name"': ["a b"],
        }
        self.read: list[str] = []

    def rows(self, table: str, at_most: int) -> list[Sequence[Any]]:
        self.read.append(table)
        rows: dict[str, list[Sequence[Any]]] = {
            "actors": [(1, "trainer"), (1 << 64, None), (3.5, {"nested": [1]})],
            "spans": [(number,) for number in range(4000)],
            'odd "name"': [(b"\xff",)],
        }
        return rows[table][:at_most]


@pytest.fixture
def tables() -> TablesOfATest:
    return TablesOfATest()


@pytest.fixture
def store(tmp_path: Path, tables: TablesOfATest) -> Iterator[Path]:
    with served(tmp_path / "query.sock", tables) as path:
        yield path


def test_a_select_gets_rows_of_the_tables_that_it_names(store: Path, tables: TablesOfATest) -> None:
    assert query(store, "SELECT id, full_name FROM actors") == [
        {"id": 1, "full_name": "trainer"},
        {"id": str(1 << 64), "full_name": None},
        {"id": 3.5, "full_name": "{'nested': [1]}"},
    ]
    assert tables.read == ["actors"]


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT count(*) AS n FROM actors", [{"n": 3}]),
        ("WITH a AS (SELECT max(id) AS m FROM spans) SELECT m FROM a", [{"m": 3999}]),
        ("SELECT 1 AS x -- and a comment", [{"x": 1}]),
        ('SELECT "a b" FROM "odd ""name"""', [{"a b": "ff"}]),
        ("SELECT x'ff' AS x", [{"x": "ff"}]),
        ("SELECT count(*) AS n FROM sqlite_master", [{"n": 3}]),
        ("SELECT s.id FROM spans s JOIN actors a ON a.id = s.id", [{"id": 1}]),
    ],
)
def test_reads_of_every_form_are_answered(
    store: Path, sql: str, rows: list[dict[str, Any]]
) -> None:
    assert query(store, sql) == rows


@pytest.mark.parametrize(
    "sql",
    [
        "COPY actors TO '{file}'",
        "CREATE EXTERNAL TABLE f STORED AS CSV LOCATION '{file}'",
        "ATTACH '{file}' AS f",
        "VACUUM INTO '{file}'",
        "VACUUM",
        "CREATE TABLE t (a)",
        "CREATE TABLE t AS SELECT * FROM actors",
        "DROP TABLE actors",
        "INSERT INTO actors VALUES (1, 2)",
        "WITH x AS (SELECT 1) INSERT INTO actors SELECT 1, 2",
        "WITH x AS (SELECT 1) DELETE FROM actors",
        "UPDATE actors SET id = 2",
        "SELECT 1; SELECT 2",
        "PRAGMA temp_store_directory = '{file}'",
        "SELECT * FROM pragma_database_list",
        "SELECT load_extension('{file}')",
        "SELECT readfile('{file}')",
        "SELECT writefile('{file}', 'x')",
        "SELECT * FROM '{file}'",
        "SELECT * FROM dbstat",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
        "REINDEX",
        "ANALYZE",
        "BEGIN",
        "EXPLAIN SELECT 1",
        "SELECT nothing FROM actors",
        "",
        ";",
        "SELECT 1\0; DROP TABLE actors",
    ],
)
def test_what_is_not_a_read_of_the_tables_is_refused(store: Path, tmp_path: Path, sql: str) -> None:
    file = tmp_path / "private"
    file.write_text("secret")
    with pytest.raises(QueryRefused):
        query(store, sql.replace("{file}", str(file)))
    assert {path.name for path in tmp_path.iterdir()} == {"private", "query.sock"}
    assert file.read_text() == "secret"
    assert query(store, "SELECT count(*) AS n FROM actors") == [{"n": 3}]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) FROM spans a, spans b, spans c",
        "SELECT a.id || b.id AS k FROM spans a, spans b ORDER BY k",
    ],
)
def test_a_query_is_ended_at_its_time_limit(store: Path, sql: str) -> None:
    with pytest.raises(QueryRefused, match="more than 0 s"):
        query(store, sql, seconds=0.0)


def test_a_table_that_is_too_long_is_refused_and_not_cut(tables: TablesOfATest) -> None:
    refused = reply(b'"spans"\n', tables, most=3999)["refused"]
    assert "spans has more than 3999 rows" in refused


def test_a_store_answers_its_owner_only(store: Path) -> None:
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert ask(store, None)["columns"]["actors"] == ["id", "full_name"]
    assert ask(store, "actors")["rows"][0] == [1, "trainer"]
    assert "the name of a table" in ask(store, "sqlite_master")["refused"]


def test_clients_that_disconnect_or_send_anything_else_end_nothing(store: Path) -> None:
    for sent in (b"", b"GET /api/query HTTP/1.1\r\nHost: evil\r\n\r\n", b"\0" * 100 + b"\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(store))
            client.sendall(sent)
    assert ask(store, "actors")["rows"][0] == [1, "trainer"]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"{}\n", b"1\n", b'"SELECT 1"\n', b"[" * 9999 + b"\n", b"\xff\n"],
)
def test_what_is_no_request_is_refused_with_what_one_is(line: bytes) -> None:
    assert "the name of a table" in reply(line, TablesOfATest())["refused"]
    assert json.dumps(reply(line, TablesOfATest()))


def test_a_store_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachable, match="has the run ended"):
        query(tmp_path / "nothing.sock", "SELECT 1")

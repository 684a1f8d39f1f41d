"""The store answers lines of JSON over a socket of its owner, whatever a client sends."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from telemetry_stores import served

from composer_mesh.mesh.telemetry_client import StoreUnreachable, ask, query
from composer_mesh.mesh.telemetry_store import reply


class OneTable:
    """A table with one row."""

    columns: Mapping[str, Sequence[str]] = {"actors": ["full_name"]}

    def rows(self, _table: str, _at_most: int) -> list[Sequence[str]]:
        return [("trainer",)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    with served(tmp_path / "query.sock", OneTable()) as path:
        yield path


def test_a_store_answers_its_owner_only(store: Path) -> None:
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert ask(store, None) == {"columns": {"actors": ["full_name"]}}
    assert ask(store, "actors") == {"rows": [["trainer"]]}
    assert "the name of a table" in ask(store, "sqlite_master")["refused"]


def test_clients_that_disconnect_or_send_anything_else_end_nothing(store: Path) -> None:
    for sent in (b"", b"GET /api/query HTTP/1.1\r\nHost: evil\r\n\r\n", b"\0" * 100 + b"\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(store))
            client.sendall(sent)
    assert ask(store, "actors")["rows"] == [["trainer"]]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"{}\n", b"1\n", b'"SELECT 1"\n', b"[" * 9999 + b"\n", b"\xff\n"],
)
def test_what_is_no_request_is_refused_with_what_one_is(line: bytes) -> None:
    assert "the name of a table" in reply(line, OneTable())["refused"]
    assert json.dumps(reply(line, OneTable()))


def test_a_store_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachable, match="has the run ended"):
        query(tmp_path / "nothing.sock", "SELECT 1")

"""The store answers lines of JSON over a socket of its owner, whatever a client sends."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from composer_mesh.mesh.telemetry_client import StoreUnreachable, ask
from composer_mesh.mesh.telemetry_store import QueryServer, reply


class OneTable:
    """A table with one row."""

    columns: Mapping[str, Sequence[str]] = {"actors": ["full_name"]}

    def rows(self, _table: str, _at_most: int) -> list[Sequence[str]]:
        return [("trainer",)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """The socket of a store that serves in a thread."""
    path = tmp_path / "query.sock"
    with QueryServer(path, OneTable()) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield path
        server.shutdown()
        serving.join()


def test_a_store_answers_its_owner_only(store: Path) -> None:
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    assert ask(store, "SELECT * FROM actors") == {"rows": [{"full_name": "trainer"}], "more": False}
    assert "authorized" in ask(store, "ATTACH '/tmp/x' AS x")["refused"]


def test_clients_that_disconnect_or_send_anything_else_end_nothing(store: Path) -> None:
    for sent in (b"", b"GET /api/query HTTP/1.1\r\nHost: evil\r\n\r\n", b"\0" * 100 + b"\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(store))
            client.sendall(sent)
    assert ask(store, "SELECT 1 AS x")["rows"] == [{"x": 1}]


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"{}\n", b'{"sql": 1}\n', b'{"sql": null}\n', b"[" * 9999 + b"\n", b"\xff\n"],
)
def test_what_is_no_request_is_refused_with_what_one_is(line: bytes) -> None:
    assert "sql" in reply(line, OneTable())["refused"]
    assert json.dumps(reply(line, OneTable()))


def test_a_store_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreachable, match="has the run ended"):
        ask(tmp_path / "nothing.sock", "SELECT 1")

"""The deeper looks say what they need when they cannot be had, and show rows as plain text."""

from __future__ import annotations

import dataclasses
import json
import os
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, write_status

STATUS = RunStatus(os.getpid(), None, "running", 1, 2, 1, "tcp")
NOBODY = "http://127.0.0.1:9"


@dataclass
class Store:
    """A telemetry store that gives one answer, and notes what it was asked."""

    answer: dict[str, Any]
    asked: list[bytes] = field(default_factory=list)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The store of a live run in `tmp_path`."""
    store = Store({})

    class Request(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            store.asked.append(self.rfile.readline())
            self.wfile.write(json.dumps(store.answer).encode() + b"\n")

    socket = tmp_path / "query.sock"
    write_status(tmp_path, dataclasses.replace(STATUS, telemetry_socket=str(socket)))
    with socketserver.UnixStreamServer(str(socket), Request) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield store
        server.shutdown()
        serving.join()


def test_rows_are_a_table_of_plain_text(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "[bold]a[/]\x1b[2J", "count": 3}, {"name": None}]
    store.answer = {"rows": rows, "more": False}
    assert main(["query", str(tmp_path), "SELECT 1"]) == 0
    out = capsys.readouterr().out
    assert [word in out for word in ("name", "count", "[bold]a[/]\\x1b[2J", " 3 ")] == [True] * 4
    assert "\x1b" not in out
    assert [json.loads(line) for line in store.asked] == [{"sql": "SELECT 1"}]


def test_rows_are_objects_on_demand(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "a"}, {"name": "b"}]
    store.answer = {"rows": rows, "more": True}
    assert main(["query", str(tmp_path), "SELECT 1", "--json"]) == 0
    told = capsys.readouterr()
    assert [json.loads(line) for line in told.out.splitlines()] == rows
    assert "only the first 2 rows" in told.err


def test_no_rows_are_said(tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.answer = {"rows": [], "more": False}
    assert main(["query", str(tmp_path), "SELECT 1"]) == 0
    assert capsys.readouterr().out == "no rows\n"


def test_a_query_that_is_refused_says_why_on_one_line(
    tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.answer = {"refused": "no table\nt"}
    assert main(["query", str(tmp_path), "SELECT 1"]) == 1
    assert "the query was refused: no table\\nt\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status", "why"),
    [
        (["query", "SELECT 1"], {}, "--set run.telemetry=true"),
        (["query", "SELECT 1"], {"telemetry_socket": "/nothing/query.sock"}, "does not answer"),
        (["query", "SELECT 1"], {"state": "finished"}, "found none"),
        (["stacks"], {"state": "finished"}, "found none"),
        (["stacks"], {}, "does not hold the lock of"),
        (["tui"], {}, "no admin server yet"),
        (["tui"], {"admin_url": NOBODY}, "needs a terminal"),
    ],
)
def test_what_cannot_be_had_is_one_sentence_and_status_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    status: dict[str, Any],
    why: str,
) -> None:
    write_status(tmp_path, dataclasses.replace(STATUS, **status))
    name, *rest = command
    assert main([name, str(tmp_path), *rest]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line

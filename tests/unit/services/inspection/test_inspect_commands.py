"""The deeper looks say what they need when they cannot be had, and show rows as plain text."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, write_status

STATUS = RunStatus(os.getpid(), None, "running", 1, 2, 1, "tcp")
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def run(tmp_path: Path, httpserver: HTTPServer) -> Path:
    """A live run with telemetry, and no admin server."""
    url = httpserver.url_for("").rstrip("/")
    write_status(tmp_path, dataclasses.replace(STATUS, telemetry_url=url))
    return tmp_path


def answer(httpserver: HTTPServer, value: Any, status: int = 200) -> None:
    asked = httpserver.expect_request("/api/query", method="POST", json={"sql": "SELECT 1"})
    asked.respond_with_json(value, status=status)


def test_rows_are_a_table_of_plain_text(
    run: Path, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(httpserver, {"rows": [{"name": "[bold]a[/]\x1b[2J", "count": 3}, {"name": None}]})
    assert main(["query", str(run), "SELECT 1"]) == 0
    out = capsys.readouterr().out
    assert [word in out for word in ("name", "count", "[bold]a[/]\\x1b[2J", " 3 ")] == [True] * 4
    assert "\x1b" not in out


def test_rows_are_objects_on_demand(
    run: Path, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"name": "a"}, {"name": "b"}]
    answer(httpserver, {"rows": rows})
    assert main(["query", str(run), "SELECT 1", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_no_rows_are_said(
    run: Path, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(httpserver, {"rows": []})
    assert main(["query", str(run), "SELECT 1"]) == 0
    assert capsys.readouterr().out == "no rows\n"


def test_a_query_that_is_refused_says_why_on_one_line(
    run: Path, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(httpserver, {"error": "no table\nt"}, status=400)
    assert main(["query", str(run), "SELECT 1"]) == 1
    assert "the query was refused: no table\\nt\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "status", "why"),
    [
        (["query", "SELECT 1"], {}, "--set run.telemetry=true"),
        (["query", "SELECT 1"], {"telemetry_url": NOBODY}, "does not answer"),
        (["query", "SELECT 1"], {"state": "finished"}, "found none"),
        (["stacks"], {}, "no admin server yet"),
        (["stacks"], {"admin_url": NOBODY}, "does not answer"),
        (["stacks"], {"state": "finished"}, "found none"),
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

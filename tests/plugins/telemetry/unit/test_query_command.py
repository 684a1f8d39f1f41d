"""A query shows rows as plain text, and says what it needs where they cannot be had."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from telemetry_stores import served

from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, write_status

STATUS = RunStatus(os.getpid(), None, "running", 1, 2, 1, "tcp")


class People:
    """The table of a telemetry store."""

    columns: Mapping[str, Sequence[str]] = {"people": ["name", "count"]}

    def rows(self, table: str, at_most: int) -> list[Sequence[Any]]:
        assert table == "people"
        return [("[bold]a[/]\x1b[2J", 3), (None, None)][:at_most]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a live run with a store."""
    with served(tmp_path / "query.sock", People()) as socket:
        write_status(tmp_path, dataclasses.replace(STATUS, telemetry_socket=str(socket)))
        yield tmp_path


def test_rows_are_a_table_of_plain_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", str(run), "SELECT * FROM people"]) == 0
    out = capsys.readouterr().out
    assert [word in out for word in ("name", "count", "[bold]a[/]\\x1b[2J", " 3 ")] == [True] * 4
    assert "\x1b" not in out


def test_rows_are_objects_on_demand(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", str(run), "SELECT name FROM people", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"name": "[bold]a[/]\x1b[2J"}, {"name": None}]


def test_no_rows_are_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", str(run), "SELECT * FROM people WHERE count = 4"]) == 0
    assert capsys.readouterr().out == "no rows\n"


def test_a_query_that_is_refused_says_why_on_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["query", str(run), 'SELECT "no\ntable".x FROM people']) == 1
    assert "the query was refused: no such column: no\\ntable.x\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({}, "--set run.telemetry=true"),
        ({"telemetry_socket": "/nothing/query.sock"}, "does not answer"),
        ({"state": "finished"}, "is not running"),
    ],
)
def test_what_cannot_be_queried_is_one_sentence_and_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: dict[str, Any], why: str
) -> None:
    write_status(tmp_path, dataclasses.replace(STATUS, **status))
    assert main(["query", str(tmp_path), "SELECT 1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line

"""`composer-mesh query`: SQL over the telemetry of a live run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_mesh.plugins.telemetry import client
from composer_mesh.services.commands.parser import RUN, argument, as_json, command
from composer_mesh.services.directory.status import RunStatus, RunUnavailable, live_run, status_of
from composer_mesh.services.inspection.page import plain_text

LONGEST_CELL = 200


@command(
    "query the telemetry of a live run in SQL",
    RUN,
    argument("sql", metavar="SQL", help='query, for example "SELECT * FROM actors"'),
    as_json("each row"),
    group="runs",
    example='query runs/quickstart "SELECT * FROM actors"',
)
def query(arguments: argparse.Namespace) -> int:
    """Print the result of an SQL query against a live run's telemetry."""
    rows = rows_of(status_of(live_run(arguments.run)), arguments.sql)
    if arguments.json:
        for row in rows:
            sys.stdout.write(json.dumps(row) + "\n")
    else:
        Console().print(_table(rows))
    return 0


def rows_of(status: RunStatus, sql: str) -> list[dict[str, Any]]:
    """Return the rows of an SQL query against a run's telemetry. Waits for them."""
    if status.telemetry_socket is None:
        raise RunUnavailable(
            "this run keeps no telemetry, which costs a process of 400 MB: start it with "
            "--set run.telemetry=true"
        )
    try:
        return client.query(Path(status.telemetry_socket), sql)
    except client.StoreUnreachable as error:
        raise RunUnavailable(str(error)) from error
    except client.QueryRefused as error:
        raise RunUnavailable(f"the query was refused: {plain_text(str(error))}") from error


def _table(rows: Sequence[dict[str, Any]]) -> Table | Text:
    if not rows:
        return Text("no rows", style="dim")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(Text(plain_text(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in rows[0]))
    return table


def _cell(value: Any) -> str:
    return "-" if value is None else plain_text(str(value), LONGEST_CELL)

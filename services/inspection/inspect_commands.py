"""Commands that inspect a live run with Monarch's tools: stacks, SQL queries and its TUI.

They query servers of the run that answer only its owner, and change nothing in the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_mesh.mesh.admin import (
    CONTROLLER_PROC,
    AdminUnreachable,
    TlsFiles,
    open_tui,
    read_mesh,
    read_stacks,
)
from composer_mesh.mesh.telemetry_client import StoreUnreachable, ask
from composer_mesh.services.directory.live import RunUnavailable, live_run, status_of
from composer_mesh.services.directory.status import RunStatus
from composer_mesh.services.inspection.mesh_view import is_controllers, owner_of
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.inspection.stacks import Stacks, read_pyspy, stack_lines

LONGEST_CELL = 200


def stacks_command(run: Path | None, native: bool = False, as_json: bool = False) -> int:
    """Print the Python stacks of every process of a live run; return 1 if any is missing."""
    status = status_of(live_run(run))
    console = Console(highlight=False)
    try:
        found = asyncio.run(all_stacks(status, native))
    except AdminUnreachable as error:
        raise RunUnavailable(str(error)) from error
    for stacks in found:
        if as_json:
            _write_json(asdict(stacks))
        else:
            for line in stack_lines(stacks):
                console.print(line, soft_wrap=True)
    return int(any(stacks.error for stacks in found))


async def all_stacks(status: RunStatus, native: bool) -> list[Stacks]:
    """Return the stacks of the controller and of each actor. Waits for all of them."""
    url = _admin_of(status)
    mesh = await asyncio.to_thread(read_mesh, url, TlsFiles.of_status(status.admin_tls))
    targets: list[tuple[str, int | None, str]] = []
    for host, proc in ((one, proc) for one in mesh.hosts for proc in one.procs):
        if proc.name == CONTROLLER_PROC and is_controllers(host, status):
            targets.append(("controller", status.pid, proc.reference))
        elif (owner := owner_of(proc, status)) is not None:
            targets.append((owner.name, owner.pid, proc.reference))
    answers = await read_stacks(
        url, [reference for *_, reference in targets], TlsFiles.of_status(status.admin_tls)
    )
    return [
        read_pyspy(name, pid, answer, native)
        for (name, pid, _), answer in zip(targets, answers, strict=True)
    ]


def query_command(run: Path, sql: str, as_json: bool = False) -> int:
    """Print the result of an SQL query against a live run's telemetry."""
    rows = query(status_of(live_run(run)), sql)
    if as_json:
        for row in rows:
            _write_json(row)
    else:
        Console().print(_table(rows))
    return 0


def query(status: RunStatus, sql: str) -> list[dict[str, Any]]:
    """Return the rows of an SQL query against a run's telemetry. Waits for them."""
    if status.telemetry_socket is None:
        raise RunUnavailable(
            "this run keeps no telemetry, which costs a process of 400 MB: start it with "
            "--set run.telemetry=true"
        )
    try:
        reply = ask(Path(status.telemetry_socket), sql)
    except StoreUnreachable as error:
        raise RunUnavailable(str(error)) from error
    if "rows" not in reply:
        raise RunUnavailable(f"the query was refused: {plain_text(str(reply.get('refused')))}")
    if reply["more"]:
        sys.stderr.write(f"only the first {len(reply['rows'])} rows: add a LIMIT or a WHERE\n")
    return list(reply["rows"])


def tui_command(run: Path | None) -> int:
    """Open Monarch's own terminal interface on a live run, until the user quits it."""
    status = status_of(live_run(run))
    url = _admin_of(status)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RunUnavailable("the interface needs a terminal: use composer-mesh tree instead")
    open_tui(url, TlsFiles.of_status(status.admin_tls))
    return 0


def _admin_of(status: RunStatus) -> str:
    if status.admin_url is None:
        raise RunUnavailable("the run has no admin server yet: ask again in a moment")
    return status.admin_url


def _table(rows: Sequence[dict[str, Any]]) -> Table | Text:
    if not rows:
        return Text("no rows", style="dim")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(Text(plain_text(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in rows[0]))
    return table


def _write_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _cell(value: Any) -> str:
    return "-" if value is None else plain_text(str(value), LONGEST_CELL)

"""The events of a run as a reader sees them, written by another process meanwhile."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, RunUnavailable, goes_on, write_status
from composer_mesh.services.inspection.events_command import (
    FollowedLines,
    event_line,
    events_command,
    print_event,
)

DIED = {
    "time": 0.0,
    "event": "actor_died",
    "actor": "generator-0",
    "detail": "the process failed: Killed(sig=9)",
    "fields": {
        "host": "localhost",
        "rank": 0,
        "cause": "the process failed: Killed(sig=9)",
        "class": "infrastructure",
    },
}
STATUS = RunStatus(os.getpid(), None, "running", 1, 2, 1, "tcp")


def write(run: Path, *events: object) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_an_event_is_one_line_with_all_that_is_known() -> None:
    line = event_line(DIED).plain
    assert line[2] == line[5] == ":"
    assert line[8:] == (
        "  actor_died        generator-0       the process failed: Killed(sig=9)"
        "  host=localhost  rank=0  class=infrastructure"
    )


@pytest.mark.parametrize("text", ["\x1b[2J", "a\nb", "[bold]x[/]", "\u202eabc", "\x9b31m"])
def test_no_text_of_an_event_is_markup_or_a_control_code(text: str) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=40)
    said = dict.fromkeys(("event", "actor", "detail"), text)
    print_event(console, json.dumps({"time": 1, **said, "fields": {text: 1}}))
    (line,) = out.getvalue().splitlines()
    assert line.isprintable()
    assert line.count("[bold]x[/]") == (4 if "bold" in text else 0)


@pytest.mark.parametrize("line", ["", "{", "[]", "7", '{"time": "never", "event": null}'])
def test_a_line_that_is_no_event_stops_nobody(line: str) -> None:
    print_event(Console(file=StringIO()), line)


def test_a_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    lines = FollowedLines(tmp_path / "events.jsonl")
    assert list(lines.new()) == []
    (tmp_path / "events.jsonl").write_text("one\ntw")
    assert list(lines.new()) == ["one"]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("o\nthree\n")
    assert list(lines.new()) == ["two", "three"]
    assert list(lines.new()) == []
    (tmp_path / "events.jsonl").write_text("new\n")
    assert list(lines.new()) == ["new"]


def test_the_lines_written_just_before_the_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("first\n")
    turns = iter((True, False))

    def more() -> bool:
        again = next(turns)
        if not again:  # the run ends right after it was seen to go on
            with path.open("a") as file:
                file.write("last\n")
        return again

    assert list(FollowedLines(path).until_the_end(more, lambda: None)) == ["first", "last"]


def test_a_finished_run_is_printed_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, DIED, {"time": 1, "event": "run_finished", "actor": "", "detail": ""})
    assert events_command(tmp_path, follow=True) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "actor_died",
        "run_finished",
    ]
    assert events_command(tmp_path, as_json=True) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == DIED


def test_a_directory_without_a_run_is_one_sentence_and_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunUnavailable, match="name the directory of a run"):
        events_command(tmp_path, follow=True)
    assert main(["events", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("composer-mesh: ")


def claim(run: Path, pid: int) -> None:
    (run / ".lock").write_text(f"{pid}\n")


def gone() -> int:
    """The id of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda run: None, False),
        (lambda run: write_status(run, STATUS), True),
        (lambda run: write_status(run, dataclasses.replace(STATUS, state="finished")), False),
        (lambda run: claim(run, os.getpid()), True),
        (lambda run: claim(run, gone()), False),
        (lambda run: (write_status(run, dataclasses.replace(STATUS, pid=gone())),), False),
    ],
    ids=["nothing", "live", "ended", "starting", "died while starting", "killed"],
)
def test_whether_a_run_goes_on(
    tmp_path: Path, prepare: Callable[[Path], object], expected: bool
) -> None:
    prepare(tmp_path)
    assert goes_on(tmp_path) is expected


def test_a_killed_run_that_is_resumed_goes_on(tmp_path: Path) -> None:
    write_status(tmp_path, dataclasses.replace(STATUS, pid=gone()))
    claim(tmp_path, os.getpid())
    assert goes_on(tmp_path)


def test_an_ended_run_of_a_process_that_has_others_to_do_does_not_go_on(tmp_path: Path) -> None:
    write_status(tmp_path, dataclasses.replace(STATUS, state="finished"))
    claim(tmp_path, os.getpid())
    assert not goes_on(tmp_path)


def test_a_reader_that_has_seen_enough_may_leave(tmp_path: Path) -> None:
    write(tmp_path, *[DIED] * 5000)
    command = [sys.executable, "-m", "composer_mesh", "events", str(tmp_path)]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert shown.stdout is not None
    assert shown.stderr is not None
    assert "actor_died" in shown.stdout.readline()
    shown.stdout.close()
    assert shown.stderr.read() == ""
    shown.stderr.close()
    assert shown.wait() == 1

"""What commands say of a run that has ended, was killed, or is live."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, write_status
from composer_mesh.services.inspection.ending import ending_of

NOBODY = 2**22
"""The id of no process."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").touch()
    return tmp_path


def ended(run: Path, state: str, *events: tuple[str, str], pid: int = NOBODY) -> None:
    write_status(run, RunStatus(pid, None, state, 3, 70, 3, "tcp"))
    lines = [
        {"event": kind, "detail": detail, "time": 1e9 + place}
        for place, (kind, detail) in enumerate(events)
    ]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))


def test_a_failed_run_says_why_and_how_to_resume_it(run: Path) -> None:
    ended(run, "failed", ("run_started", "x"), ("run_failed", "no \x1b[2J memory"))
    found = ending_of(run)
    assert found is not None
    happened, resume, events = found.lines()
    assert happened.startswith(f"{run} is not running: it failed on 2001-09-09 ")
    assert happened.endswith(": no \\x1b[2J memory")
    place = f"{run}/config.toml --output {run} --resume"
    assert resume == f"resume it with: composer-mesh train {place}"
    assert events == f"its last events: composer-mesh events {run}"


def test_a_killed_run_says_what_it_did_last(run: Path) -> None:
    ended(run, "running", ("run_stopped", "earlier"), ("run_started", "x"), ("actor_died", "gone"))
    found = ending_of(run)
    assert found is not None
    assert found.state == "killed"
    happened, *_ = found.lines()
    assert "it was killed, or its machine went down, after its last event on 2001" in happened
    assert happened.endswith(": step 3 of 70, last event actor_died")


def test_a_finished_run_is_evaluated_and_not_resumed(run: Path) -> None:
    ended(run, "finished", ("run_started", "x"), ("run_finished", ""))
    found = ending_of(run)
    assert found is not None
    assert found.resume == ""
    assert list(found.lines())[1:] == [f"evaluate it with: composer-mesh eval {run}"]


def test_an_evaluation_names_no_command_of_training(run: Path) -> None:
    (run / "evaluation.json").touch()
    ended(run, "stopped", ("run_stopped", "40 of 200"))
    found = ending_of(run)
    assert found is not None
    assert len(list(found.lines())) == 1


def test_a_live_run_and_a_folder_without_one_have_no_ending(run: Path, tmp_path: Path) -> None:
    ended(run, "running", ("run_started", "x"), pid=os.getpid())
    assert ending_of(run) is None
    assert ending_of(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("last", "time"),
    [("{}", None), ('{"time": 1e999}', None), ('{"time": "x"}', None), ("[", None)],
)
def test_any_last_line_of_a_stranger_is_an_ending(run: Path, last: str, time: Any) -> None:
    ended(run, "running", ("run_started", "x"))
    with (run / "events.jsonl").open("a") as file:
        file.write(f"{last}\n")
    found = ending_of(run)
    assert found is not None
    assert all(line.isprintable() for line in found.lines())


@pytest.mark.parametrize(
    "words",
    [["tree"], ["stacks"], ["tui"], ["scale", "generator=2"], ["stop"]],
)
def test_each_command_that_needs_a_live_run_says_how_it_ended(
    run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended(run, "failed", ("run_started", "x"), ("run_failed", "no memory"))
    assert main([words[0], str(run), *words[1:]]) == 1
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith(f"composer-mesh: {run} is not running: it failed on ")
    assert first.endswith(": no memory")
    assert len(others) == 2


def test_events_end_with_what_happened(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(run, "failed", ("run_started", "x"), ("run_failed", "no memory"))
    assert main(["events", str(run)]) == 0
    assert "is not running: it failed on" in capsys.readouterr().out
    assert main(["events", str(run), "--json"]) == 0
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == [
        "run_started",
        "run_failed",
    ]

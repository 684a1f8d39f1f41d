"""Exit statuses that a parent records: of its own child, not of an earlier process of the pid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_mesh.mesh.hosts import exit_status
from composer_mesh.mesh.hosts.exit_status import ExitStatuses, how_it_ended

PID = 4321
CODE_0, KILLED = "its process exited with code 0", "its process failed: Killed(sig=9)"
HOUR_NS = 3600 * 10**9


def test_how_a_child_has_ended_is_recorded_by_its_parent(tmp_path: Path) -> None:
    noting = (
        "import pathlib, subprocess, sys, threading, time\n"
        "from composer_mesh.mesh.hosts.exit_status import ExitStatuses\n"
        "statuses = ExitStatuses(pathlib.Path(sys.argv[1]))\n"
        "threading.Thread(target=statuses.keep, daemon=True).start()\n"
        "child = subprocess.Popen(['sh', '-c', 'read line; exit 7'], stdin=subprocess.PIPE)\n"
        "while not statuses.recorded_ns(child.pid): time.sleep(0.01)\n"
        "print(child.pid, flush=True)\n"
        "child.stdin.close()\n"  # nobody may collect it before its end is noted
        "while statuses.of(child.pid) is None: time.sleep(0.01)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", noting, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    statuses = ExitStatuses(tmp_path)
    assert statuses.of(int(done.stdout)) == "its process exited with code 7"
    assert statuses.of(1) is None


@pytest.fixture
def earlier(tmp_path: Path) -> ExitStatuses:
    """The records of a parent whose child had the same pid an hour ago."""
    (tmp_path / "earlier").mkdir()
    statuses = ExitStatuses(tmp_path / "earlier")
    statuses.note(PID, CODE_0)
    record = next((tmp_path / "earlier").rglob(str(PID)))
    an_hour_ago = record.stat().st_mtime_ns - HOUR_NS
    os.utime(record, ns=(an_hour_ago, an_hour_ago))
    return statuses


@pytest.fixture
def own(tmp_path: Path) -> ExitStatuses:
    """The records of the parent of a process that has just started."""
    (tmp_path / "own").mkdir()
    statuses = ExitStatuses(tmp_path / "own")
    statuses.begin(PID)
    return statuses


async def test_the_end_of_an_earlier_process_of_the_pid_is_not_told(
    earlier: ExitStatuses, own: ExitStatuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def parent_records_it(_: float) -> None:
        own.note(PID, KILLED)

    monkeypatch.setattr(exit_status.asyncio, "sleep", parent_records_it)
    assert await how_it_ended(PID, [earlier, own]) == KILLED
    assert await how_it_ended(PID, [own, earlier]) == KILLED


async def test_how_a_process_ended_is_unknown_while_its_parent_has_not_recorded_it(
    earlier: ExitStatuses, own: ExitStatuses
) -> None:
    assert await how_it_ended(PID, [earlier, own]) is None
    assert await how_it_ended(PID, []) is None
    assert await how_it_ended(PID, [earlier]) == CODE_0


def test_a_child_that_is_found_replaces_the_record_of_an_earlier_one(
    earlier: ExitStatuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(Exception):
        pass

    def looked(_: float) -> None:
        raise Found

    assert earlier.of(PID) == CODE_0
    monkeypatch.setattr(exit_status, "children_of", lambda *_: [PID])
    monkeypatch.setattr(exit_status, "wait_for_child", lambda _: None)
    monkeypatch.setattr(exit_status.time, "sleep", looked)
    with pytest.raises(Found):
        earlier.keep()
    assert earlier.of(PID) is None

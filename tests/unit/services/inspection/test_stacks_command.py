"""Stacks of a run's processes: read here and on other hosts by the controller, and drawn."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import until_named

from composer_mesh.mesh.pyspy import PYSPY, StackDump
from composer_mesh.services.directory.control import Control
from composer_mesh.services.directory.status import ActorStatus, RunStatus
from composer_mesh.services.inspection import inspect_commands
from composer_mesh.services.inspection.inspect_commands import (
    ProcessStacks,
    all_stacks,
    read_pyspy,
    stack_lines,
)

CALL = {"name": "work", "module": None, "filename": "/x/a.py", "short_filename": "a.py", "line": 7}
THREADS = [
    {
        "thread_id": 1,
        "os_thread_id": 11,
        "thread_name": "MainThread",
        "active": True,
        "owns_gil": False,
        "frames": [CALL],
    }
]


@pytest.fixture
def trainer() -> Iterator[int]:
    """The process of an actor that this one, as the controller, has started."""
    title = ["composer-mesh", "-c", "read line", "trainer", "token", str(os.getpid())]
    with subprocess.Popen(title, executable="/bin/sh", stdin=subprocess.PIPE) as process:
        until_named(process.pid)
        yield process.pid
        process.kill()


@pytest.fixture
def status(trainer: int) -> RunStatus:
    return RunStatus(
        *(os.getpid(), None, "running", 1, 2, 1, "tcp"),
        actors=(
            ActorStatus("trainer", "trainer", trainer),
            ActorStatus("generator-0", "generator", 31, host="host-0"),
            ActorStatus("generator-1", "generator", 32, host="host-0"),
            ActorStatus("generator-2", "generator", 33, host="host-1"),
            ActorStatus("environment-0", "environment", None),
        ),
    )


@pytest.fixture(autouse=True)
def pyspy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy that lists the same threads for each process."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport json\nprint(json.dumps({THREADS!r}))\n")
    program.chmod(0o700)
    monkeypatch.setenv(PYSPY, str(program))


def names(found: list[ProcessStacks]) -> list[tuple[str, int | None, str]]:
    """Name, pid and call of each process; why there is none for one that was not read."""
    return [(one.process, one.pid, one.error or ", ".join(one.threads[0].frames)) for one in found]


async def test_processes_here_are_read_from_here_and_others_through_the_controller(
    tmp_path: Path, status: RunStatus, trainer: int
) -> None:
    asked: list[dict[str, Any]] = []

    async def stacks(**about: Any) -> list[Any]:
        asked.append(about)
        if about["host"] == "host-1":
            raise RuntimeError("its host host-1 is lost")
        return [{"threads": THREADS}, {"error": "Operation not permitted"}]

    async with Control(tmp_path, {"stacks": stacks}):
        found = await all_stacks(tmp_path, status, native=True)
    assert names(found) == [
        ("controller", os.getpid(), "work (a.py:7)"),
        ("trainer", trainer, "work (a.py:7)"),
        ("generator-0", 31, "work (a.py:7)"),
        ("generator-1", 32, "Operation not permitted"),
        ("generator-2", 33, "stacks failed: RuntimeError: its host host-1 is lost"),
    ]
    assert asked == [
        {"host": "host-0", "pids": [31, 32], "native": True},
        {"host": "host-1", "pids": [33], "native": True},
    ]


async def test_stacks_of_many_processes_fit_into_a_reply(tmp_path: Path, status: RunStatus) -> None:
    many = [THREADS[0] | {"frames": [CALL] * 2000}] * 2

    async def stacks(pids: list[int], **_: Any) -> list[Any]:
        return [{"threads": many} for _ in pids]

    async with Control(tmp_path, {"stacks": stacks}):
        found = await all_stacks(tmp_path, status, native=False)
    assert [len(one.threads) for one in found] == [1, 1, 2, 2, 2]


async def test_a_controller_that_hangs_costs_only_what_it_would_have_read(
    tmp_path: Path, status: RunStatus, trainer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_commands, "CONTROLLER_S", 0.2)

    async def stacks(**_: Any) -> None:
        await asyncio.Event().wait()

    async with Control(tmp_path, {"stacks": stacks}):
        found = names(await all_stacks(tmp_path, status, native=False))
    assert found[:2] == [
        ("controller", os.getpid(), "work (a.py:7)"),
        ("trainer", trainer, "work (a.py:7)"),
    ]
    assert {told for *_, told in found[2:]} == {
        f"the controller did not answer for {host} in 0.2 s" for host in ("host-0", "host-1")
    }


async def test_a_process_that_the_controller_did_not_start_is_not_read(
    tmp_path: Path, status: RunStatus
) -> None:
    named = replace(status, actors=(ActorStatus("trainer", "trainer", os.getppid()),))
    assert names(await all_stacks(tmp_path, named, native=False)) == [
        ("controller", os.getpid(), "work (a.py:7)"),
        ("trainer", os.getppid(), f"process {os.getppid()} is not, or no longer, of this run"),
    ]


async def test_without_a_controller_the_processes_here_are_read(
    tmp_path: Path, status: RunStatus
) -> None:
    found = names(await all_stacks(tmp_path, status, native=False))
    assert [told for *_, told in found[:2]] == ["work (a.py:7)"] * 2
    assert all("takes no commands" in told for *_, told in found[2:])


def frame(name: str, module: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "module": module,
        "filename": "/x/a.py",
        "short_filename": "a.py",
        "line": 7,
    }


def thread(name: str, *frames: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = {"thread_id": 1, "os_thread_id": 11, "active": False, "owns_gil": False, **more}
    return {**about, "thread_name": name, "frames": list(frames)}


DUMP: StackDump = {
    "threads": [
        thread("MainThread", frame("work"), active=True, owns_gil=True),
        thread("native", frame("spin", "libc.so"), os_thread_id=None),
        thread("idle"),
    ]
}


def drawn(dump: StackDump, idle: bool = True) -> list[str]:
    return [line.plain for line in stack_lines(read_pyspy("echo-0", 42, dump), idle)]


def test_a_process_is_drawn_with_its_threads_and_their_calls() -> None:
    assert drawn(DUMP) == [
        "echo-0  pid 42",
        *("  thread 11 MainThread  active, holds the GIL", "    work (a.py:7)"),
        *("  thread 1 native  idle", "    spin (a.py:7)"),
    ]


def test_idle_threads_are_counted_until_they_are_requested() -> None:
    assert drawn(DUMP, idle=False) == [
        "echo-0  pid 42",
        *("  thread 11 MainThread  active, holds the GIL", "    work (a.py:7)"),
        "  1 idle thread: --all shows them",
    ]
    both = {"threads": [thread("a", frame("wait")), thread("b", frame("wait"))]}
    assert drawn(both, idle=False) == ["echo-0  pid 42", "  2 idle threads: --all shows them"]


def test_a_process_that_cannot_be_read_says_why() -> None:
    why = "Operation not permitted"
    assert drawn({"error": why}) == ["echo-0  pid 42", f"  {why}"]


def test_what_its_threads_lack_is_told_before_them() -> None:
    assert drawn({**DUMP, "note": "no calls of C code"})[1:3] == [
        "  no calls of C code",
        "  thread 11 MainThread  active, holds the GIL",
    ]


def test_no_name_in_a_stack_is_a_control_code() -> None:
    odd = frame("a\x1b[2Jb")
    assert all(line.isprintable() for line in drawn({"threads": [thread("t\nu", odd)]}))
    assert all(line.isprintable() for line in drawn({"error": "a\x1b[2Jb"}))

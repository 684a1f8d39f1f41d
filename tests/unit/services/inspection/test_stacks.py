"""What py-spy says about a process, read and drawn, and what is said where it says nothing."""

from __future__ import annotations

from typing import Any

from composer_mesh.mesh.pyspy import StackDump
from composer_mesh.services.inspection.inspect_commands import read_pyspy, stack_lines


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


def drawn(dump: StackDump) -> list[str]:
    return [line.plain for line in stack_lines(read_pyspy("echo-0", 42, dump))]


def test_a_process_is_drawn_with_its_threads_and_their_calls() -> None:
    assert drawn(DUMP) == [
        "echo-0  pid 42",
        *("  thread 11 MainThread  active, holds the GIL", "    work (a.py:7)"),
        *("  thread 1 native  idle", "    spin (a.py:7)"),
    ]


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

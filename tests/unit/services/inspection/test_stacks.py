"""What py-spy says about a process, read and drawn, and what is said where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.services.inspection.stacks import NOT_FOUND, read_pyspy, stack_lines


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


ANSWER = {
    "Ok": {
        "pid": 42,
        "stack_traces": [
            thread(
                "MainThread", frame("poll", "libc.so"), frame("work"), active=True, owns_gil=True
            ),
            thread("native", frame("spin", "libc.so"), os_thread_id=None),
        ],
    }
}


def drawn(answer: dict[str, Any], native: bool = False) -> list[str]:
    return [line.plain for line in stack_lines(read_pyspy("echo-0", 42, answer, native))]


def test_a_process_is_drawn_with_its_threads_and_their_python_calls() -> None:
    assert drawn(ANSWER) == [
        "echo-0  pid 42",
        "  thread 11 MainThread  active, holds the GIL",
        "    work (a.py:7)",
    ]


def test_calls_of_c_code_are_drawn_when_asked_for() -> None:
    assert drawn(ANSWER, native=True)[2:] == [
        *("    poll (a.py:7)", "    work (a.py:7)"),
        *("  thread 1 native  idle", "    spin (a.py:7)"),
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"BinaryNotFound": {"searched": ["py-spy on PATH"]}}, NOT_FOUND),
        ({"Failed": {"exit_code": 1, "stderr": "no"}}, "Failed: exit_code 1, stderr no: is it"),
        ({"Silent": "ReadTimeout"}, "Silent: ReadTimeout: is it stopped"),
        ({}, "is it stopped"),
    ],
)
def test_a_process_that_nobody_can_look_into_says_why(answer: dict[str, Any], why: str) -> None:
    first, second = drawn(answer)
    assert first == "echo-0  pid 42"
    assert why in second


def test_no_name_in_a_stack_is_a_control_code() -> None:
    odd = frame("a\x1b[2Jb")
    answer = {"Ok": {"pid": 1, "stack_traces": [thread("t\nu", odd)]}}
    assert all(line.isprintable() for line in drawn(answer))

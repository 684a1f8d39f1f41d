"""Stacks of processes, by a py-spy that reads, fails, hangs, or is not there."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_mesh.mesh import pyspy
from composer_mesh.mesh.environment import PYSPY
from composer_mesh.mesh.processes import is_alive, stands_still
from composer_mesh.mesh.pyspy import NOT_FOUND, dump_stacks, find_pyspy

WritePyspy = Callable[[str], Path]
DEADLINE_S = 20.0
TELLS = "print('[{\"asked\": \"' + ' '.join(sys.argv[1:]) + '\"}]')"
"""Body of a py-spy that lists one thread: how it was asked."""


@pytest.fixture
def write_pyspy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WritePyspy:
    """A py-spy with this script as its body, which finds its arguments in `sys.argv`."""

    def write(body: str) -> Path:
        program = tmp_path / "py-spy"
        program.write_text(f"#!{sys.executable}\nimport sys, time\n{body}\n")
        program.chmod(0o700)
        monkeypatch.setenv(PYSPY, str(program))
        return program

    return write


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A process that computes nothing."""
    with subprocess.Popen(["sleep", "600"], text=True) as started:
        yield started
        started.kill()


async def test_each_process_is_read_in_order(write_pyspy: WritePyspy) -> None:
    write_pyspy(TELLS)
    asked = "dump --json --pid {}"
    assert await dump_stacks([1, os.getpid()]) == [
        {"threads": [{"asked": asked.format(1)}]},
        {"threads": [{"asked": asked.format(os.getpid())}]},
    ]
    assert await dump_stacks([1], native=True) == [
        {"threads": [{"asked": asked.format(1) + " --native"}]}
    ]


async def test_a_stopped_process_is_read_without_a_pause(
    write_pyspy: WritePyspy, process: subprocess.Popen[str]
) -> None:
    write_pyspy(TELLS)
    os.kill(process.pid, signal.SIGSTOP)
    end = time.monotonic() + DEADLINE_S
    while not stands_still(process.pid):
        assert time.monotonic() < end
    threads = [{"asked": f"dump --json --pid {process.pid} --nonblocking"}]
    assert await dump_stacks([process.pid]) == [{"threads": threads}]
    assert await dump_stacks([process.pid], native=True) == [
        {"threads": threads, "note": "no calls of C code: it is stopped"}
    ]


async def test_a_process_that_has_ended_is_told(
    write_pyspy: WritePyspy, process: subprocess.Popen[str]
) -> None:
    write_pyspy(TELLS)
    process.kill()
    process.wait()
    assert await dump_stacks([process.pid]) == [{"error": f"process {process.pid} has ended"}]


async def test_where_calls_of_c_code_cannot_be_read_those_of_python_are(
    write_pyspy: WritePyspy,
) -> None:
    write_pyspy(f"if '--native' in sys.argv: sys.exit('Error: no unwinding')\n{TELLS}")
    assert await dump_stacks([1], native=True) == [
        {
            "threads": [{"asked": "dump --json --pid 1"}],
            "note": "no calls of C code: no unwinding",
        }
    ]
    write_pyspy("sys.exit('Error: ' + ' '.join(sys.argv[5:]) + 'no process')")
    assert await dump_stacks([1], native=True) == [{"error": "no process"}]


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ("Error: No such process", "No such process"),
        (
            "Error: Failed\n\nCaused by:\n    0: Operation not permitted\n",
            "Operation not permitted",
        ),
        ("", "py-spy ended with status 3"),
    ],
)
async def test_what_py_spy_says_of_a_failure_is_told_for_its_process(
    write_pyspy: WritePyspy, errors: str, told: str
) -> None:
    write_pyspy(f"sys.stderr.write({errors!r})\nsys.exit(3)")
    assert await dump_stacks([1, os.getpid()]) == [{"error": told}] * 2


async def test_one_that_hangs_is_ended(
    write_pyspy: WritePyspy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    write_pyspy(f"import os\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    monkeypatch.setattr(pyspy, "DUMP_S", 5.0)
    (told,) = await dump_stacks([1])
    assert "failed: it did not end within 5 s" in told["error"]
    assert not is_alive(int(await asyncio.to_thread(begun.read_text)))


async def test_one_that_cannot_be_started_says_how_to_get_it(
    write_pyspy: WritePyspy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = write_pyspy("")
    program.chmod(0o600)
    (told,) = await dump_stacks([1])
    assert told["error"] == f"{program}: it cannot be started: Permission denied. {NOT_FOUND}"
    program.unlink()
    (told,) = await dump_stacks([1])
    missing = "it is not installed here, or not on PATH"
    assert told["error"] == f"{program}: {missing}. {NOT_FOUND}"
    monkeypatch.delenv(PYSPY)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing" / "python"))
    assert find_pyspy() is None
    assert await dump_stacks([1, 2]) == [{"error": NOT_FOUND}] * 2

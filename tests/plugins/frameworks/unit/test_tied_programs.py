"""A program that is tied to this process: its result, and the end of all that it started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.programs import (
    FinishedProgram,
    ProgramFailed,
    ProgramNotStarted,
    TiedProgram,
    run,
)
from composer_mesh.plugins.frameworks.verifiers.driver_process import LineProgram

LEAVES_ONE = "sleep 600 & echo $!"
ENVIRON = dict(os.environ)
STARTER = """
import os, sys
from pathlib import Path
from composer_mesh.mesh.programs import TiedProgram
program = TiedProgram(["sh", "-c", "sleep 600 & echo $! $$ > pids.new; mv pids.new pids; wait"],
                       dict(os.environ), Path.cwd())
program.finish("")
"""


def started(*command: str) -> TiedProgram:
    return TiedProgram(command, dict(os.environ), Path.cwd())


def wait_for_end(pid: int) -> None:
    while is_alive(pid):
        time.sleep(0.01)


def test_a_program_has_its_input_output_errors_and_status() -> None:
    program = started("sh", "-c", "cat; echo bad >&2; exit 3")
    assert program.finish("said") == FinishedProgram(3, "said", "bad\n")
    program.close()


def test_a_program_that_a_signal_ends_has_its_negative_number_as_status() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        program = started("sh", "-c", f"kill -{number:d} $$")
        assert program.finish("").status == -number
        program.close()


def test_a_program_is_told_of_a_broken_pipe() -> None:
    program = started("sh", "-c", "yes | head -n 1")
    assert program.finish("") == FinishedProgram(0, "y\n", "")
    program.close()


def test_a_program_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProgramFailed, match="not installed here"):
        started("no-such-program")


def test_a_program_that_cannot_be_run_to_its_end_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    file = tmp_path / "program"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o600)
    with pytest.raises(ProgramNotStarted, match="it cannot be started: Permission denied"):
        run([str(file)])
    with pytest.raises(ProgramNotStarted, match="it is not installed here, or not on PATH"):
        run([str(tmp_path / "none")])
    with pytest.raises(ProgramNotStarted, match=r"the folder \S+/none does not exist"):
        run(["true"], folder=tmp_path / "none")


def test_a_program_that_cannot_run_says_why(tmp_path: Path) -> None:
    file = tmp_path / "program"
    file.write_text("neither a script nor a binary")
    file.chmod(0o755)
    program = started(str(file))
    done = program.finish("")
    program.close()
    assert done.status == 127
    assert "cannot be started: Exec format error" in done.stderr


def test_what_a_program_leaves_ends_with_it_although_it_holds_the_output() -> None:
    program = started("sh", "-c", LEAVES_ONE)
    done = program.finish("")
    assert done.status == 0
    wait_for_end(int(done.stdout))
    program.close()


def test_what_a_program_moves_into_sessions_of_its_own_ends_with_it_too() -> None:
    program = started("sh", "-c", f"setsid sh -c '{LEAVES_ONE}' & wait; sleep 0")
    done = program.finish("")
    assert done.status == 0
    wait_for_end(int(done.stdout))
    program.close()


def test_a_program_is_told_lines_and_says_lines_until_its_input_ends() -> None:
    program = LineProgram(["sh", "-c", "sed -u s/a/b/; echo bad >&2; exit 4"], ENVIRON, Path.cwd())
    lines = program.lines()
    for word in ("ab", "ca"):
        program.send(word)
        assert next(lines) == word.replace("a", "b", 1) + "\n"
    assert program.close(60.0) == 4
    assert program.last_words() == "bad"


def test_a_program_that_ignores_the_end_of_its_input_is_killed() -> None:
    program = LineProgram(["sh", "-c", "setsid sleep 600 & echo $!; wait"], ENVIRON, Path.cwd())
    pid = int(next(program.lines()))
    assert program.close(0.0) == -signal.SIGKILL
    wait_for_end(pid)
    with pytest.raises((BrokenPipeError, ValueError)):
        program.send("x")


def test_a_program_that_is_closed_ends_with_all_that_it_started(tmp_path: Path) -> None:
    program = TiedProgram(["sh", "-c", f"{LEAVES_ONE} > left; wait"], dict(os.environ), tmp_path)
    while not (tmp_path / "left").exists() or not (tmp_path / "left").read_text():
        time.sleep(0.01)
    program.close()
    assert program.finish("").status == -signal.SIGKILL
    wait_for_end(int((tmp_path / "left").read_text()))


def test_a_program_and_what_it_started_end_with_their_owner_however_that_ends(
    tmp_path: Path,
) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], cwd=tmp_path)
    while not (tmp_path / "pids").exists():
        time.sleep(0.01)
    starter.kill()
    starter.wait()
    for pid in (tmp_path / "pids").read_text().split():
        wait_for_end(int(pid))

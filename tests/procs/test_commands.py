"""Commands that the tests fork: like started ones in all that a test or a run sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from commands import ForkedCommand, Process, forked, started
from live_run import PRESET, RUN_DEADLINE_S, composer_mesh, wait_until

from composer_mesh.services.directory.status import RunStatus, write_status

WAYS = {"started": started, "forked": forked}
FOLLOWS = ("events", "run", "--follow")


@pytest.fixture(params=sorted(WAYS))
def following(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    """A command that waits for more to read until it is ended, in a folder of its own."""
    (tmp_path / "run").mkdir()
    write_status(tmp_path / "run", RunStatus(os.getpid(), None, "training", 1, 2, 1, "tcp", ()))
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = WAYS[request.param](FOLLOWS, out, err, tmp_path)
    yield process
    process.kill()
    process.wait(RUN_DEADLINE_S)


def test_a_command_leads_a_session_in_its_folder_with_the_signals_of_a_new_process(
    following: Process, tmp_path: Path
) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("a shell started the tests in the background, where Ctrl-C is ignored")
    assert os.getsid(following.pid) == os.getpgid(following.pid) == following.pid
    assert Path(f"/proc/{following.pid}/cwd").readlink() == tmp_path
    ignored = ignored_signals(os.getpid())  # Python's, and what started the tests: nohup, CI
    assert {signal.SIGPIPE, signal.SIGXFSZ} <= ignored
    wait_until(lambda: ignored_signals(following.pid) == ignored, "signals", RUN_DEADLINE_S)
    wait_until(lambda: not mask(following.pid, "SigBlk"), "no blocked signal", RUN_DEADLINE_S)
    wait_until(lambda: catches_sigint(following.pid), "handler of Ctrl-C", RUN_DEADLINE_S)
    own = {"/dev/null", str(tmp_path / "out"), str(tmp_path / "err")}
    wait_until(lambda: open_files(following.pid) <= own, "no other open file", RUN_DEADLINE_S)
    following.kill()
    assert following.wait(RUN_DEADLINE_S) == following.poll() == -signal.SIGKILL


def ignored_signals(pid: int) -> set[int]:
    ignored = mask(pid, "SigIgn")
    return {number for number in range(1, 65) if ignored & 1 << (number - 1)}


def catches_sigint(pid: int) -> bool:
    return bool(mask(pid, "SigCgt") & 1 << (signal.SIGINT - 1))


def mask(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found, 16)


def open_files(pid: int) -> set[str]:
    found = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed in the meantime
            found.add(str(one.readlink()))
    return found


def test_a_command_that_is_not_done_in_time_is_a_timeout(following: Process) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        following.wait(0.01)
    following.terminate()
    assert following.wait(RUN_DEADLINE_S) == -signal.SIGTERM


def test_a_forked_command_says_and_returns_what_a_started_one_does(tmp_path: Path) -> None:
    for words, status in ((["check", str(PRESET)], 0), (["check", "nowhere"], 2), (["tree"], 1)):
        command = [sys.executable, "-m", "composer_mesh", *words]
        real = subprocess.run(command, capture_output=True, text=True, check=False)
        fork = composer_mesh(*words)
        assert (real.returncode, real.stdout, real.stderr) == (
            fork.returncode,
            fork.stdout,
            fork.stderr,
        )
        assert fork.returncode == status


def test_commands_are_forked_unless_a_library_would_read_another_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("wb") as out:
        one = forked(["--version"], out, out)
        monkeypatch.setenv("LC_ALL", "C.UTF-8")
        two = forked(["--version"], out, out)
        assert [process.wait(RUN_DEADLINE_S) for process in (one, two)] == [0, 0]
    assert [isinstance(process, ForkedCommand) for process in (one, two)] == [True, False]

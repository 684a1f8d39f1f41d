"""Looking at the run of another user: nothing of it is run, and their controller is not obeyed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from composer_mesh.mesh.machine import this_host
from composer_mesh.services.cli import main
from composer_mesh.services.directory.status import RunStatus, write_status

NOBODY = 65534
COMMANDS = [
    ["tree"],
    ["stacks"],
    ["tui"],
    ["query", "SELECT 1"],
    ["scale", "generator=2"],
    ["join", "tls://127.0.0.1:9"],
    ["stop"],
    ["reward", "train-000000-000", "1"],
    ["events"],
    ["traces"],
    ["verify"],
]
ANSWER = b'{"answer": {"generator": {"before": 1, "after": 666}}}\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory of another user."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    os.chown(run, NOBODY, NOBODY)
    return run


def give(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


@contextmanager
def served(run: Path) -> Iterator[list[bytes]]:
    """A control socket on which the other user listens, and what it is sent."""
    listener, sent = socket.socket(socket.AF_UNIX), list[bytes]()
    os.seteuid(NOBODY)
    try:
        listener.bind(str(run / "control.sock"))
        listener.listen()
    finally:
        os.seteuid(0)

    def serve() -> None:
        with suppress(OSError):  # the test closes the listener
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(ANSWER)
                    sent.append(connection.recv(1000))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield sent
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_looking_at_another_users_run_starts_no_program(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = run / "it ran"
    planted = ["sh", "-c", f"touch '{mark}'", "sh"]
    for kind in ("hosts", "slurm", "kubernetes", "local"):
        fields = {"kind": kind, "run": str(run), "job": "1", "python": str(run / "python")}
        fields |= {"folder": str(run), "reach": planted, "log": None, "namespace": ""}
        (run / "launch.json").write_text(json.dumps(fields))
        give(run / "launch.json")
        for words in COMMANDS:
            assert main([words[0], str(run), *words[1:]]) != 0
            assert "Traceback" not in capsys.readouterr().err
    assert not mark.exists()


def test_the_controller_of_another_user_gets_no_command(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(run, RunStatus(os.getpid(), None, "train", 1, 2, 1, "shm", host=this_host()))
    with served(run) as sent:
        for words in (["scale", str(run), "generator=2"], ["stop", str(run)]):
            assert main(words) == 1
            said = capsys.readouterr()
            assert f"belongs to user {NOBODY}" in said.err
            assert "666" not in said.out
    assert set(sent) <= {b""}


def test_a_stop_signals_no_process_that_another_users_lock_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "600"]) as victim:
        (run / ".lock").write_text(f"{victim.pid}\n")
        give(run / ".lock")
        assert main(["stop", str(run)]) == 1
        assert victim.poll() is None
        victim.kill()
    assert "takes no commands" in capsys.readouterr().err

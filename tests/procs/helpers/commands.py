"""Commands of the package as processes: started by the interpreter, or forked from a warmed one.

A fork is the same program in a process that has imported torch already: seconds of a core less for
each of the many runs here. `started` keeps the way by which users start it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from composer_mesh.mesh.fork_server.protocol import ForkRequest, import_signature, send_request

SERVERS = "TESTS_COMMAND_SERVERS"
"""Environment variable with the folder of the command servers' sockets."""


class Process(Protocol):
    """What tests use of a process: `subprocess.Popen` has it too."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkedCommand:
    """A command that was forked from a command server; `returncode` is as `subprocess` has it."""

    def __init__(
        self,
        server: Path,
        arguments: Sequence[str],
        folder: Path,
        out: IO[bytes],
        err: IO[bytes],
        environment: Mapping[str, str],
    ) -> None:
        self.args, self.returncode, self._rest = list(arguments), None, b""
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(str(server))
        request = ForkRequest(self.args, dict(environment), str(folder), os.getpid())
        with Path(os.devnull).open("rb") as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            send_request(self._connection, request, streams)
        pid = self._answer("pid", None)
        assert pid is not None
        self.pid = pid

    returncode: int | None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (status := self._answer("ended", timeout)) is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
            self._connection.close()
        return self.returncode

    def _answer(self, kind: str, timeout: float | None) -> int | None:
        """The value of the server's next answer; None if it has not come in time."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                return None
            part = self._connection.recv(64)
            assert part, f"the command server ended before it said {kind}"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        found, value = line.decode().split()
        assert found == kind
        return int(value)


def current_environment() -> dict[str, str]:
    """A copy of this process's environment, which a test changes while threads start runs."""
    found = ((name, os.environ.get(name)) for name in [*os.environ])
    return {name: value for name, value in found if value is not None}


def started(
    arguments: Sequence[str],
    out: IO[bytes],
    err: IO[bytes],
    folder: Path | None = None,
    within: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Process:
    """A command as a user starts it, in a session of its own; `within` is put before it."""
    command = [*within, sys.executable, "-m", "composer_mesh", *arguments]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        cwd=folder,
        env=current_environment() if environment is None else environment,
        start_new_session=True,
    )


def forked(
    arguments: Sequence[str],
    out: IO[bytes],
    err: IO[bytes],
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Process:
    """A command in a fork of the command server; started where none fits the environment."""
    environment = current_environment() if environment is None else environment
    servers = environment.get(SERVERS)  # the tests of attacks have none
    server = Path(servers or "", f"{import_signature(environment)}.sock")
    if servers is None or not server.exists():
        return started(arguments, out, err, folder, environment=environment)
    return ForkedCommand(server, arguments, folder or Path.cwd(), out, err, environment)


def finished(
    arguments: Sequence[str],
    timeout: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command that was run to its end, in a fork."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = forked(arguments, out, err, folder, environment)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        for stream in (out, err):
            stream.seek(0)
        said = [stream.read().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(list(arguments), status, *said)

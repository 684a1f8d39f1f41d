"""What Monarch starts in place of a process that is forked: it asks a server for the fork.

It takes ten megabytes, passes SIGTERM on to the fork and ends with the same status as the fork,
which the server kills when this process ends. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from composer_mesh.mesh.fork_server.protocol import ForkRequest, send_request

LOST = 1
"""Exit status when nobody could say how the fork ended."""


def run_forked(server: str, arguments: list[str], parent: int) -> NoReturn:
    """Run `mesh.bootstrap` with these arguments in a fork of `server`; end as it ends.

    `parent` is the process that started this one: the fork ends with it too.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(server)
        request = ForkRequest(arguments, dict(os.environ), str(Path.cwd()), os.getpid())
        send_request(connection, request)
        answers = _Answers(connection, parent)
        pid = int(answers.next("pid"))
    except (OSError, EOFError) as error:
        sys.stderr.write(f"composer-mesh: {arguments[0]}: its fork server is gone ({error})\n")
        sys.stderr.flush()
        os._exit(LOST)
    signal.signal(signal.SIGTERM, lambda number, _: _pass_on(pid, number))
    try:
        end_like(int(answers.next("ended")))
    except (OSError, EOFError):  # the server has ended, and the kernel has killed its forks
        os._exit(LOST)


class _Answers:
    """The server's answers by line, while the parent of this process lives."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection, self._rest = connection, b""
        self._parent = os.pidfd_open(parent)

    def next(self, kind: str) -> str:
        """Return the value of the next answer. Raises `EOFError` if the connection ends before."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._parent, self._connection.fileno()], [], [])
            if self._parent in ready:
                os._exit(LOST)
            if not (part := self._connection.recv(64)):
                raise EOFError(f"no {kind}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        found, _, value = line.decode().partition(" ")
        if found != kind:
            raise EOFError(f"{found!r} for {kind!r}")
        return value


def end_like(status: int) -> NoReturn:
    """End with the wait status of another process: its exit code, or its signal without a core."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else LOST)


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

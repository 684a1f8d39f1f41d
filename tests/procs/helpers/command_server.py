"""A program that starts commands as forks of one interpreter, which has imported what they import.

    test --> server   length, JSON of a `ForkRequest`, the command's three streams as descriptors
    server --> test   "pid 1234\\n", then, when the command has ended, "ended STATUS\\n"

A fork leads a session, runs `composer_mesh.__main__` as the installed command does and ends as an
interpreter ends. Arguments: the descriptors of the listening socket and of a pipe to the owner, the
pid of the owner with which the server ends, and the modules to import.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import time

from setproctitle import getproctitle, setproctitle

from composer_mesh.mesh.fork_server.protocol import (
    READY,
    ForkRefused,
    ForkRequest,
    receive_request,
)
from composer_mesh.mesh.fork_server.server import load, seed_anew

COMMANDS = (
    *("composer_mesh.services.cli", "composer_mesh.services.directory.curve"),
    *("composer_mesh.services.commands.evaluation", "composer_mesh.services.commands.inspection"),
    *("composer_mesh.services.schedule.metrics", "composer_mesh.services.replay.pair_stream"),
    *("composer_mesh.actors.models.template_process", "composer_mesh.services.launch.workers"),
    *("composer_mesh.services.replay.teacher_settings", "composer_mesh.mesh.admin"),
    "composer_mesh.services.inspection.view",
    *("composer_mesh.plugins.telemetry.store", "composer_mesh.plugins.telemetry.client"),
)
"""What commands import beside what the processes of a run do; nothing of it imports Monarch."""


class CommandServer:
    """Forks commands, and tells each asking test how its command ended."""

    def __init__(self, listening: socket.socket, owner: int) -> None:
        self._listening = listening
        self._owner_ended = os.pidfd_open(owner)
        self._woken, self._wakes = socket.socketpair()
        self._asking: dict[int, socket.socket] = {}
        """The connection of the test that asked, by the pid of its command."""

    def request(self) -> ForkRequest | None:
        """Serve; returns None when the owner has ended, and in a fork its request."""
        for one in (self._woken, self._wakes):
            one.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno())
        with selectors.DefaultSelector() as selector:
            for waited in (self._listening, self._woken, self._owner_ended):
                selector.register(waited, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._owner_ended in ready:
                    return None
                if self._woken in ready:
                    self._reap()
                if self._listening in ready and (request := self._accept()) is not None:
                    return request

    def _accept(self) -> ForkRequest | None:
        """Fork for the next connection; returns its request in the fork."""
        connection, _ = self._listening.accept()
        try:
            request, streams = receive_request(connection)
        except (ForkRefused, OSError) as error:
            sys.stderr.write(f"command server: request refused: {error}\n")
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._leave()
            become(request, streams)
            self._tell(connection, f"pid {os.getpid()}")  # it leads its session by now
            connection.close()
            return request
        for descriptor in streams:
            os.close(descriptor)
        self._asking[pid] = connection
        return None

    def _leave(self) -> None:
        """Close in a fork what belongs to the server."""
        signal.set_wakeup_fd(-1)
        os.close(self._owner_ended)
        for one in (*self._asking.values(), self._listening, self._woken, self._wakes):
            one.close()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._asking.pop(ended[0])
                self._tell(connection, f"ended {ended[1]}")
                connection.close()

    def _tell(self, connection: socket.socket, words: str) -> None:
        with contextlib.suppress(OSError):  # the test does not wait for it any more
            connection.sendall(f"{words}\n".encode())


def become(request: ForkRequest, streams: list[int]) -> None:
    """Take the session, signals, streams, environment, folder and arguments of a new process."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    time.tzset()
    tempfile.tempdir = None  # it was chosen by the server's environment
    sys.argv = ["composer-mesh", *request.arguments]
    setproctitle(f"{sys.executable} -m composer_mesh {' '.join(request.arguments)}")
    seed_anew()


def main() -> None:
    """Serve by the command line; in a fork, run the command."""
    listens, says, _, owner, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    getproctitle()  # finds the title's memory by the environment, which forks replace
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would not be in a fork
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a look for GPUs would initialize CUDA
    load(modules)
    os.write(int(says), READY)
    os.close(int(says))
    server = CommandServer(socket.socket(fileno=int(listens)), int(owner))
    if server.request() is not None:
        runpy.run_module("composer_mesh", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

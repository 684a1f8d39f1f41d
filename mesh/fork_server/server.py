"""The program of a fork server: imports torch and transformers once, then forks on request.

Every process of a run imports the same libraries: five seconds of a core each. A fork has them at
once and shares their memory. Monarch starts threads when it is imported, which no fork would have,
so each fork imports Monarch itself. Forks end with their server, by the kernel.

Arguments: the descriptors of the listening socket and of a pipe to the owner, the folder of exit
statuses, the pid of the owner with which the server ends, and the modules to import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from setproctitle import getproctitle, setproctitle

from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.fork_server.protocol import (
    READY,
    SERVER,
    ForkRefused,
    ForkRequest,
    receive_request,
)
from composer_mesh.mesh.hosts.exit_status import ExitStatuses
from composer_mesh.mesh.hosts.process_lifetime import end_with_parent
from composer_mesh.mesh.processes import BOOTSTRAP, exit_in_words
from composer_mesh.mesh.tcp_peer import is_own_user

REQUEST_S = 10.0
BAD_FORK = "CUDA was initialized before the fork"
NOT_BEFORE_A_FORK = "monarch"


@dataclass
class ForkServer:
    """Forks processes, and tells each asking process how its fork ended."""

    listening: socket.socket
    statuses: ExitStatuses
    owner: int
    _asking: dict[socket.socket, int] = field(default_factory=dict)
    """The connection of each asking process, and the pid of its fork."""

    def serve(self) -> None:
        """Serve until the owner has ended."""
        self._owner_ended = os.pidfd_open(self.owner)
        self._woken, wakes = socket.socketpair()
        for one in (self._woken, wakes):
            one.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno())
        self._own = [self.listening, self._woken, wakes]
        self._selector = selectors.DefaultSelector()
        for waited in (self.listening, self._woken, self._owner_ended):
            self._selector.register(waited, selectors.EVENT_READ)
        while not self._ended(self._selector.select()):
            pass
        signal.set_wakeup_fd(-1)  # the sockets close before the last forks have ended

    def _ended(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> bool:
        for key, _ in ready:
            if key.fileobj == self._owner_ended:
                return True
            if key.fileobj is self.listening:
                self._accept()
            elif key.fileobj is self._woken:
                self._reap()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._asking:
                self._left(key.fileobj)  # unless its fork has just ended too
        return False

    def _accept(self) -> None:
        connection, _ = self.listening.accept()
        connection.settimeout(REQUEST_S)
        try:
            if not is_own_user(connection):
                raise ForkRefused("it belongs to another user")
            request, streams = receive_request(connection)
        except (ForkRefused, OSError) as error:
            sys.stderr.write(f"composer-mesh fork server: request refused: {error}\n")
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            self._become(request, streams, connection)
        self.statuses.begin(pid)
        for descriptor in streams:
            os.close(descriptor)
        self._asking[connection] = pid
        self._selector.register(connection, selectors.EVENT_READ)
        self._tell(connection, f"pid {pid}")

    def _become(
        self, request: ForkRequest, streams: list[int], connection: socket.socket
    ) -> NoReturn:
        """Turn this fork into the requested process; never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            os.close(self._owner_ended)
            for one in (*self._own, connection, *self._asking):
                one.close()
            run(request, streams)
        finally:  # never back into the server's loop, whatever happened
            os._exit(1)

    def _reap(self) -> None:
        """Record and tell the exit of each fork that has ended."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None:
                self.statuses.note(ended.si_pid, exit_in_words(ended))
                pid, status = os.waitpid(ended.si_pid, 0)
                self._tell_end(pid, status)

    def _tell_end(self, pid: int, status: int) -> None:
        for connection in [one for one, forked in self._asking.items() if forked == pid]:
            self._tell(connection, f"ended {status}")
            self._forget(connection)

    def _left(self, connection: socket.socket) -> None:
        """Kill the fork of a process that has ended: they end together."""
        pid = self._asking[connection]
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
        self._forget(connection)

    def _tell(self, connection: socket.socket, words: str) -> None:
        with contextlib.suppress(OSError):  # it ended in the meantime, which `_left` handles
            connection.sendall(f"{words}\n".encode())

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._asking[connection]
        connection.close()


def run(request: ForkRequest, streams: list[int]) -> NoReturn:
    """Run `mesh.bootstrap` in this fork, with the request's streams, environment and folder."""
    end_with_parent()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ.pop(SERVER, None)
    with contextlib.suppress(FileNotFoundError):  # as in a process that is started there
        os.chdir(request.folder)
    time.tzset()
    tempfile.tempdir = None  # it was chosen by the server's environment
    sys.argv = [BOOTSTRAP, *request.arguments]
    setproctitle(f"composer-mesh {' '.join(request.arguments)}")
    if cuda_is_unusable():
        start_anew(request)
    seed_anew()
    from composer_mesh.mesh import bootstrap

    bootstrap.main(request.arguments, lambda: bootstrap.wait_for_end_of(request.asked_by))
    os._exit(0)


def cuda_is_unusable() -> bool:
    """Whether a library that was imported before the fork has initialized CUDA.

    Without a GPU there is nothing to initialize, but counting GPUs marks a process all the same.
    """
    torch = sys.modules.get("torch")
    bad = None if torch is None else getattr(torch._C, "_cuda_isInBadFork", None)
    return torch is not None and bad is not None and bad() and torch.cuda.device_count() > 0


def start_anew(request: ForkRequest) -> NoReturn:
    """Replace this fork by a fresh interpreter, which can initialize CUDA."""
    name = request.arguments[0]
    sys.stderr.write(f"composer-mesh: {name} starts without the fork server: {BAD_FORK}\n")
    sys.stderr.flush()
    arguments = [*request.arguments, str(request.asked_by)]
    program = python_module(BOOTSTRAP, *arguments)
    os.execv(program[0], program)


def seed_anew() -> None:
    """Seed NumPy's global generator, which does not notice a fork as others do."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def load(modules: Sequence[str]) -> None:
    """Import modules; nothing that they create is moved or freed by the forks' garbage collectors.

    Raises `RuntimeError` if one of them imports Monarch.
    """
    for name in modules:
        importlib.import_module(name)
    if NOT_BEFORE_A_FORK in sys.modules:
        raise RuntimeError(f"{modules} import Monarch, whose threads a fork would not have")
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve by the command line."""
    listens, says, folder, owner, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    getproctitle()  # finds the title's memory by the environment, which forks replace
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would not be in a fork
    # Without it, a look for GPUs while transformers is imported would initialize CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    load(modules)
    os.write(int(says), READY)
    os.close(int(says))
    listening = socket.socket(fileno=int(listens))
    ForkServer(listening, ExitStatuses(Path(folder)), int(owner)).serve()


if __name__ == "__main__":
    main()

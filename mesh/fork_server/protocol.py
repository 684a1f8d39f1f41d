"""What a process asks of a fork server, and how the answer is read. Imports nothing heavy.

    process --> server   length, JSON of a `ForkRequest`, the three standard streams as descriptors
    server --> process   "pid 1234\n", then, when that process has ended, "ended STATUS\n"

The forked process is killed when either end of the connection closes.

What Monarch starts in place of a process that is forked: it asks a server for the fork.

It takes ten megabytes, passes SIGTERM on to the fork and ends with the same status as the fork,
which the server kills when this process ends. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from composer_mesh.mesh.hosts.process_lifetime import LOST, end_as

SERVER = "COMPOSER_MESH_FORK_SERVER"
"""Path of the socket of the fork server that a process is to be forked from."""
FOLDER = "COMPOSER_MESH_FORK_SERVERS"
"""Folder with the sockets of fork servers that several runs of one user share; for test suites."""
READ_ON_IMPORT = (
    *(
        "LANG",
        "LC_",
        "OMP_",
        "MKL_",
        "KMP_",
        "GOMP_",
        "OPENBLAS_",
        "NUMEXPR_",
        "LD_",
        "MALLOC_",
        "GLIBC_",
    ),
    *("PYTHON", "TORCH", "PYTORCH", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "CUBLAS_"),
)
"""Prefixes of variables that libraries read when they are loaded, so that a fork is too late."""
READY = b"ready"
"""What a server writes to its owner when it can fork."""
STREAMS = (0, 1, 2)
LENGTH = struct.Struct("!I")
LONGEST_BYTES = 16 << 20


class ForkRefused(Exception):
    """A request to a fork server that is not one."""


@dataclass(frozen=True)
class ForkRequest:
    """The process to be: `arguments` of `mesh.bootstrap`, environment, folder, and who asks."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    asked_by: int


def import_signature(environment: Mapping[str, str]) -> str:
    """Name the interpreter and all variables that libraries read on import: 16 hexadecimal digits.

    A process may be forked from a server only if both have the same, and if both are in the same
    namespaces and control groups.
    """
    read = {name: environment[name] for name in sorted(environment) if is_read_on_import(name)}
    spaces = sorted(str(space.readlink()) for space in Path("/proc/self/ns").glob("*"))
    groups = [one.read_text() for one in [Path("/proc/self/cgroup")] if one.exists()]
    text = json.dumps([sys.executable, read, spaces, groups])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_read_on_import(name: str) -> bool:
    """Whether a library reads this environment variable when it is loaded."""
    return name.startswith(READ_ON_IMPORT)


def send_request(
    connection: socket.socket, request: ForkRequest, streams: Sequence[int] = STREAMS
) -> None:
    """Send a request, with three standard streams: by default those of this process."""
    body = json.dumps(asdict(request)).encode()
    socket.send_fds(connection, [LENGTH.pack(len(body))], list(streams))
    connection.sendall(body)


def receive_request(connection: socket.socket) -> tuple[ForkRequest, list[int]]:
    """Receive a request and its three streams, which the caller closes. Raises `ForkRefused`."""
    head, streams, _, _ = socket.recv_fds(connection, LENGTH.size, len(STREAMS))
    try:
        if len(head) != LENGTH.size or len(streams) != len(STREAMS):
            raise ForkRefused(f"{len(head)} bytes and {len(streams)} streams are not a request")
        (length,) = LENGTH.unpack(head)
        if length > LONGEST_BYTES:
            raise ForkRefused(f"a request of {length} bytes; the longest has {LONGEST_BYTES}")
        return ForkRequest(**json.loads(_exactly(connection, length))), streams
    except (ForkRefused, ValueError, TypeError, OSError) as error:
        for descriptor in streams:
            os.close(descriptor)
        raise ForkRefused(str(error)) from error


def _exactly(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        if not (part := connection.recv(length - len(found))):
            raise ForkRefused(f"it closed after {len(found)} of {length} bytes")
        found += part
    return bytes(found)


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
        end_as(os.waitstatus_to_exitcode(int(answers.next("ended"))))
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


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

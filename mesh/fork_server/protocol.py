"""What a process asks of a fork server, and how the answer is read. Imports nothing heavy.

    process --> server   length, JSON of a `ForkRequest`, the three standard streams as descriptors
    server --> process   "pid 1234\\n", then, when that process has ended, "ended STATUS\\n"

The forked process is killed when either end of the connection closes.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
            raise ForkRefused(f"{len(head)} bytes and {len(streams)} streams are no request")
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

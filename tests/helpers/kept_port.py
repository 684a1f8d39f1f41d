"""The port of a server that is not there yet, or comes back: nobody else gets it meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port(port: int = 0) -> Iterator[int]:
    """Keep a port of 127.0.0.1, 0 for any, on which no server listens; yield its number.

    A server may listen on it while it is kept, and connections are refused until then. The system
    gives such a port to no other program and no connection.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", port))
        yield int(kept.getsockname()[1])

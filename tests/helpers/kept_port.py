"""The port of a server that is started again: nobody else gets it in the meantime."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port(port: int) -> Iterator[None]:
    """Keep a port of 127.0.0.1 on which no server listens; another one may listen while it is kept.

    Connections are refused until then. The system gives such a port to no connection of others.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", port))
        yield

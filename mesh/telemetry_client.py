"""Asks the telemetry store of a run, over its Unix socket. Does not import Monarch."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_mesh.mesh.tcp_peer import is_own_user

QUERY_S = 30.0
LONGEST_REPLY = 64 << 20


class StoreUnreachable(ConnectionError):
    """The store of a run does not answer."""


def ask(store: Path, sql: str) -> dict[str, Any]:
    """Send a query to a store; return its reply. Raises `StoreUnreachable`."""
    try:
        with connected(store) as connection:
            connection.sendall(json.dumps({"sql": sql}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                reply: dict[str, Any] = json.loads(answer.readline(LONGEST_REPLY))
    except (OSError, ValueError) as error:
        raise StoreUnreachable(f"{store} does not answer ({error}): has the run ended?") from error
    return reply


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Connect to a store of this user; closed after the block. Raises `StoreUnreachable`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(QUERY_S)
        connection.connect(str(path))
        if not is_own_user(connection):
            raise StoreUnreachable(f"{path} belongs to another user: ask for a run of your own")
        yield connection

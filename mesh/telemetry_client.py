"""Asks the telemetry store of a run, over its Unix socket. Does not import Monarch."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUERY_S = 30.0


class StoreUnreachable(ConnectionError):
    """The store of a run does not answer."""


def ask(store: Path, sql: str) -> dict[str, Any]:
    """Send a query to a store; return its reply. Raises `StoreUnreachable`."""
    try:
        with connected(store) as connection:
            connection.sendall(json.dumps({"sql": sql}).encode() + b"\n")
            with connection.makefile("rb") as answer:
                reply: dict[str, Any] = json.loads(answer.readline())
    except (OSError, ValueError) as error:
        raise StoreUnreachable(f"{store} does not answer ({error}): has the run ended?") from error
    return reply


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Connect to a store; closed after the block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(QUERY_S)
        connection.connect(str(path))
        yield connection

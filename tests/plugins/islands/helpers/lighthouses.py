"""A real lighthouse of torchft in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LighthouseServer = pytest.importorskip("torchft._torchft").LighthouseServer
"""Tests are skipped on platforms for which torchft has no wheel."""
JOIN_MS = 60_000
HEARTBEAT_MS = 2_000


@contextmanager
def lighthouse_server(min_replicas: int = 1, port: int = 0) -> Iterator[str]:
    """Yield the address of a lighthouse; islands that send heartbeats are waited for."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=min_replicas,
        join_timeout_ms=JOIN_MS,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    try:
        bound = server.address().rpartition(":")[2].rstrip("/")
        yield f"http://127.0.0.1:{bound}"
    finally:
        server.shutdown()

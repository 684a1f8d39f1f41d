"""A telemetry store in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from composer_mesh.plugins.telemetry.store import QueryServer, Tables


@contextmanager
def served(path: Path, tables: Tables) -> Iterator[Path]:
    """Serve tables at a socket, in a thread, while the block runs."""
    with QueryServer(path, tables) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield path
        server.shutdown()
        serving.join()

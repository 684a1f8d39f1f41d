"""What runs in a job: `train` with the config of a variable, and a thread that copies its records.

A cloud that announces the end of a job by SIGTERM gets a checkpoint, as from any run.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from composer_mesh.configs.load import load_config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.islands.jobs.jobs import CONFIG
from composer_mesh.plugins.islands.jobs.records import RunRecords
from composer_mesh.plugins.islands.store.opening import open_store
from composer_mesh.plugins.islands.store.port import StoreUnavailable
from composer_mesh.services.checks.accepting import UsageError

SEND_S = 15.0
"""Seconds between two copies of the records."""


def train_in_job(output: Path, train: Callable[[Path], int]) -> int:
    """Train the island with the config of the variable CONFIG; return the status of `train`.

    `train` gets the config as a file. Raises `UsageError` without the variable.
    """
    text = os.environ.pop(CONFIG, None)
    if text is None:
        raise UsageError(f"{CONFIG} is not set: `islands --on` starts jobs that have it")
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.parent / f"{output.name}.toml"
    write_whole(file, text.encode())
    islands = load_config(file).islands
    if islands.store is None:
        raise UsageError(f"the config in {CONFIG} has no islands.store: set it")
    store = open_store(islands.store, islands.request_s)
    copies = _Copies(RunRecords(store, islands.rank, output))
    try:
        return train(file)
    finally:
        copies.close(islands.request_s)


class _Copies:
    """Copies the records every SEND_S seconds; what could not be copied is copied next time."""

    def __init__(self, records: RunRecords) -> None:
        self._records, self._closed = records, threading.Event()
        self._thread = threading.Thread(target=self._copy, name="records", daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Copy what is left; gives up after `within_s`."""
        self._closed.set()
        self._thread.join()
        until = time.monotonic() + within_s
        while not self._sent() and time.monotonic() < until:
            time.sleep(1.0)

    def _copy(self) -> None:
        while not self._closed.wait(SEND_S):
            self._sent()

    def _sent(self) -> bool:
        try:
            self._records.send()
        except (StoreUnavailable, OSError) as failed:
            sys.stderr.write(f"composer-mesh: the run's records are not copied: {failed}\n")
            return False
        return True

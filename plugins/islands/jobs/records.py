"""The records of an island that has no folder in common with whoever looks at it.

The island copies them to the store where the islands meet, at `records/RANK/`; a reader copies them
from there into a run directory, on which `tree`, `dashboard` and the summary work as on any other.
"""

from __future__ import annotations

from pathlib import Path

from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.plugins.islands.store.port import LARGEST_OBJECT, ObjectStore, StoreUnavailable
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    TIMELINE_FILE,
)
from composer_mesh.services.directory.resume import CONFIG_FILE
from composer_mesh.services.directory.status import EVENTS_FILE, STATUS_FILE

RECORDS = (
    *(CONFIG_FILE, EVENTS_FILE, METRICS_FILE, EVALUATIONS_FILE, TIMELINE_FILE),
    *(STATUS_FILE, SUMMARY_FILE),
)
"""The files that are copied; how a run ended is in the last two, so they come last."""
MOST_BYTES = LARGEST_OBJECT
"""Largest record that is copied, since a stranger may write to a store."""


class RunRecords:
    """The records of one island, in its run directory and in the store."""

    def __init__(self, store: ObjectStore, rank: int, run: Path) -> None:
        self._store, self._folder, self._run = store, f"records/{rank}", run
        self._sent: dict[str, bytes] = {}

    def send(self) -> None:
        """Copy what has changed to the store; raises `StoreUnavailable`."""
        for name in RECORDS:
            path = self._run / name
            if path.is_file() and (data := path.read_bytes()) != self._sent.get(name):
                self._store.put(f"{self._folder}/{name}", data)
                self._sent[name] = data

    def fetch(self) -> None:
        """Copy what the store has into the run directory; raises `StoreUnavailable`."""
        for name in RECORDS:
            key = f"{self._folder}/{name}"
            size = self._store.size(key)
            if size is None:
                continue
            if size > MOST_BYTES:
                raise StoreUnavailable("copy", key, f"it has {size} bytes, above {MOST_BYTES}")
            data = self._store.get(key)
            path = self._run / name
            if data is not None and not (path.is_file() and path.read_bytes() == data):
                self._run.mkdir(parents=True, exist_ok=True)
                write_whole(path, data)

    def forget(self) -> None:
        """Remove the records of an earlier run from the store; raises `StoreUnavailable`."""
        for name in RECORDS:
            self._store.delete(f"{self._folder}/{name}")

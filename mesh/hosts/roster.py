"""Worker discovery: a shared folder with one small file per worker.

    runs/NAME/hosts/gpu-0.json  {"name": "gpu-0", "address": "service<2M>@tls://gpu-0:22300", ...}

A worker that replaces another of the same name overwrites its file. A record gives a worker's
address, not whether it is still listening.

The lease of a host: how long it continues without its controller, stored in a file.

The host's agent renews it on the controller's beats; the worker, a separate process without
blocking work, checks whether it has expired. Both run on one machine and use the same clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import MIB, read_json

LEASE_FILE = "lease"
ENDED = "ended"


@dataclass(frozen=True)
class Lease:
    """The lease of one worker, stored in its folder."""

    folder: Path
    clock: Callable[[], float] = time.monotonic

    def renew(self, at: float | None = None) -> None:
        """Renew the lease as of a time of the clock, by default now."""
        self._write(f"{self.clock() if at is None else at:.3f}")

    def end(self) -> None:
        """Mark the run as ended: the host is released."""
        self._write(ENDED)

    @property
    def ended(self) -> bool:
        """Whether the controller has released the host."""
        return self._read() == ENDED

    def age_s(self) -> float | None:
        """Seconds since the last renewal; None before the first."""
        said = self._read()
        if not said or said == ENDED:
            return None
        return max(0.0, self.clock() - float(said))

    def _write(self, text: str) -> None:
        draft = self.folder / f".{LEASE_FILE}.{os.getpid()}"
        draft.write_text(text)
        draft.replace(self.folder / LEASE_FILE)

    def _read(self) -> str:
        try:
            return (self.folder / LEASE_FILE).read_text()
        except FileNotFoundError:
            return ""


class LeaseRenewal:
    """Renews a lease by the controller's beats.

    A beat counts from its arrival, but only once the controller reports that it received the
    answer: if answers are lost, the controller considers the host lost, and so must the host
    itself.
    """

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._came: dict[int, float] = {}

    def renew(self, number: int, received: int) -> None:
        """Handle a beat; `received` is the last one that the controller has an answer to, or 0."""
        now = self._lease.clock()
        self._came[number] = now
        self._came = {one: at for one, at in self._came.items() if one >= received}
        if received == 0 or received in self._came:
            self._lease.renew(self._came.get(received, now))


ROSTER = "hosts"
"""Folder in a run's directory in which its workers announce themselves."""


@dataclass(frozen=True)
class Record:
    """A worker's process address and interpreter; `boot` and `pid` identify its process."""

    name: str
    address: str
    python: str
    pid: int
    boot: str


def announce(folder: Path, record: Record) -> None:
    """Write or replace the record of a worker atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(asdict(record)).encode() + b"\n"
    with OpenFolder(folder.parent) as run:
        run.write_whole(f"{folder.name}/{_file(folder, record.name).name}", content, synced=False)


def withdraw(folder: Path, record: Record) -> None:
    """Remove a worker's own record, but not that of another worker with the same name."""
    if _read(_file(folder, record.name)) == record:
        _file(folder, record.name).unlink(missing_ok=True)


def read_roster(folder: Path) -> list[Record]:
    """Return the announced workers, sorted by name in natural order."""
    found = (_read(file) for file in folder.glob("*.json"))
    return sorted((one for one in found if one is not None), key=_in_order)


def read_record(folder: Path, name: str) -> Record | None:
    """Return the record of a name, None if there is none."""
    return _read(_file(folder, name))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _read(file: Path) -> Record | None:
    """Read a record; return None for other files, which users may have put there."""
    try:
        about: dict[str, Any] = read_json(file, MIB)
        return Record(**{key: about[key] for key in Record.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in_order(record: Record) -> tuple[str, int, str]:
    """Sort key of a natural order: `gpu-10` after `gpu-9`."""
    stem, _, number = record.name.rpartition("-")
    return (stem, int(number), "") if number.isdecimal() else (record.name, -1, "")

"""Worker discovery: a shared folder with one small file per worker.

    runs/NAME/hosts/gpu-0.json  {"name": "gpu-0", "address": "tls://10.0.0.5:22300", ...}

A worker that replaces another of the same name overwrites its file. A record gives a worker's
address, not whether it is still listening.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import MIB, read_json

ROSTER = "hosts"
"""Folder in a run's directory in which its workers announce themselves."""


@dataclass(frozen=True)
class Record:
    """A worker's address and interpreter; `boot` and `pid` identify its process."""

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

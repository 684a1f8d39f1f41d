"""Who is there: a folder that all hosts see, with one small file for each worker.

    runs/NAME/hosts/gpu-0.json  {"name": "gpu-0", "address": "tls://10.0.0.5:22300", ...}

A worker that comes in place of another under the same name replaces its file. A record says where a
worker listens, not that it still does.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROSTER = "hosts"
"""The folder of a run in which its workers announce themselves."""


@dataclass(frozen=True)
class Record:
    """A worker: where it listens, with which interpreter; `boot` and `pid` tell it from others."""

    name: str
    address: str
    python: str
    pid: int
    boot: str


def announce(folder: Path, record: Record) -> None:
    """Write or replace the record of a worker, as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{record.name}.{os.getpid()}"
    draft.write_text(json.dumps(asdict(record)) + "\n")
    draft.replace(_file(folder, record.name))


def withdraw(folder: Path, record: Record) -> None:
    """Remove a worker's own record; that of another under the same name stays."""
    if _read(_file(folder, record.name)) == record:
        _file(folder, record.name).unlink(missing_ok=True)


def read_roster(folder: Path) -> list[Record]:
    """The workers that have announced themselves, by their names in natural order."""
    found = (_read(file) for file in folder.glob("*.json"))
    return sorted((one for one in found if one is not None), key=_in_order)


def read_record(folder: Path, name: str) -> Record | None:
    """The record under a name, None where there is none."""
    return _read(_file(folder, name))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _read(file: Path) -> Record | None:
    """A record; what is no record is none, for the folder belongs to the user too."""
    try:
        about: dict[str, Any] = json.loads(file.read_text())
        return Record(**{key: about[key] for key in Record.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in_order(record: Record) -> tuple[str, int, str]:
    """`gpu-10` after `gpu-9`."""
    stem, _, number = record.name.rpartition("-")
    return (stem, int(number), "") if number.isdecimal() else (record.name, -1, "")

"""The manifest of a checkpoint: each of its files with size and CRC-32.

Every writer syncs its files to disk and records them; the manifest of all records is written last.
So a folder with a manifest was complete once, and `damage` checks whether it still is. Damaged
files of a run are moved into its `quarantine/`, never deleted. Does not load torch.
"""

import itertools
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from composer_mesh.configs.regular_files import open_regular, read_regular
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.progress import made_progress

MANIFEST_FILE = "manifest.json"
FORMAT = 2
"""Format of checkpoints: 1 had `torch.distributed.checkpoint` shards, which are pickles."""
_MOST_BYTES = 1 << 26
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_CHUNK = 1 << 22


@dataclass(frozen=True, order=True)
class WrittenFile:
    """A file on disk: its path relative to the checkpoint's folder, its size and its CRC-32."""

    path: str
    bytes: int
    crc32: int


def written(folder: Path, paths: Iterable[Path]) -> list[WrittenFile]:
    """Sync files of a folder to disk and return their records. Blocks on the disk."""
    return [_noted(folder, path) for path in sorted(paths)]


def _noted(folder: Path, path: Path) -> WrittenFile:
    to_disk(path)
    made_progress(f"{path.name} on disk")
    return WrittenFile(path.relative_to(folder).as_posix(), path.stat().st_size, crc32_of(path))


def write_manifest(folder: Path, step: int, files: Iterable[WrittenFile]) -> None:
    """Write the manifest of a step's checkpoint; it is on disk on return."""
    noted = {
        one.path: {"bytes": one.bytes, "crc32": f"{one.crc32:08x}"} for one in sorted(set(files))
    }
    content = {"format": FORMAT, "step": step, "files": noted}
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    to_disk(path)


def damage(folder: Path) -> list[str]:
    """Return the damage of a checkpoint's files, a line each; reads every byte.

    Files that are not in the manifest are ignored.
    """
    try:
        files = _read(folder)
    except (*_UNREADABLE, RecursionError) as error:
        return [f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"]
    return [line for one in files if (line := _wrong(folder, one))]


def _read(folder: Path) -> list[WrittenFile]:
    content = json.loads(read_regular(folder / MANIFEST_FILE, _MOST_BYTES))
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r} is not {FORMAT}")
    return [
        WrittenFile(_inside(name), int(noted["bytes"]), int(noted["crc32"], 16))
        for name, noted in content["files"].items()
    ]


def _inside(name: str) -> str:
    """Return a path that stays inside the checkpoint's folder; raises ValueError for others."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable():
        raise ValueError(f"it names {name[:80]!r}, which is not a file of a checkpoint")
    return name


def _wrong(folder: Path, one: WrittenFile) -> str:
    """Return what is wrong with one file, or an empty string."""
    path = folder / one.path
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != one.bytes:
                return f"{one.path} has {size} bytes but {one.bytes} were written"
            found = _crc32(file)
    except FileNotFoundError:
        return f"{one.path} is missing"
    except OSError as error:
        return f"{one.path} cannot be read ({error.strerror})"
    if found != one.crc32:
        return f"{one.path} is not as it was written: CRC-32 {found:08x} but was {one.crc32:08x}"
    return ""


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file's contents."""
    with open_regular(path) as file:
        return _crc32(file)


def _crc32(file: BinaryIO) -> int:
    found = 0
    while chunk := file.read(_CHUNK):
        found = zlib.crc32(chunk, found)
    return found


def to_disk(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


FOLDER = "quarantine"


def quarantine(root: Path, path: Path, name: str = "") -> Path:
    """Move a file or folder into quarantine, optionally renamed; return its new path."""
    folder = root / FOLDER
    with OpenFolder(root) as opened:
        opened.make(FOLDER)
    names = (f"{name or path.name}{f'.{n}' if n else ''}" for n in itertools.count())
    place = next(folder / one for one in names if not (folder / one).exists())
    path.rename(place)
    to_disk(folder)
    to_disk(path.parent)
    return place

"""The id that a run has in a tracker, kept in the run's directory, so that a resume finds it."""

from __future__ import annotations

from pathlib import Path

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.open_folder import OpenFolder

ID_FILE = "id"
LONGEST = 200


def kept_id(folder: Path) -> str:
    """Return the id in a tracker's folder; an empty text without one."""
    try:
        return read_regular(folder / ID_FILE, LONGEST).decode().strip()
    except FileNotFoundError:
        return ""


def keep_id(folder: Path, identity: str) -> str:
    """Write an id into a tracker's folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    with OpenFolder(folder) as opened:
        opened.write_whole(ID_FILE, f"{identity}\n".encode())
    return identity

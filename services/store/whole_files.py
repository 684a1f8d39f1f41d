"""Atomic file replacement: a file is complete or absent, however the writing process ends."""

from pathlib import Path

from composer_mesh.mesh.open_folder import OpenFolder


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically, also where it is a link; it is on disk on return."""
    with OpenFolder(path.parent) as folder:
        folder.write_whole(path.name, content)

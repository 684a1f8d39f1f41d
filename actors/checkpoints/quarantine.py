"""Moves damaged files and folders of a run into its `quarantine/`; never deletes them."""

import itertools
from pathlib import Path

from composer_mesh.actors.checkpoints.manifest import to_disk
from composer_mesh.mesh.open_folder import OpenFolder

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

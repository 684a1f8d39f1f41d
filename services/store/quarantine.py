"""Quarantine: damaged files are moved into `quarantine/` and never deleted."""

from pathlib import Path

FOLDER = "quarantine"


def quarantine(root: Path, path: Path) -> Path | None:
    """Move a file or folder to quarantine; return its new path, or None if it does not exist."""
    if not path.exists():
        return None
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    place, number = folder / path.name, 1
    while place.exists():
        place, number = folder / f"{path.name}.{number}", number + 1
    path.rename(place)
    return place

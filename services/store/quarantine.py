"""What was found damaged is moved out of the way, into `quarantine/`, and never deleted.

Who finds it tells of it; nothing here judges.
"""

from pathlib import Path

FOLDER = "quarantine"


def quarantine(root: Path, path: Path) -> Path | None:
    """Move a file or folder of a run away; its new place, or None where there is nothing."""
    if not path.exists():
        return None
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    place, number = folder / path.name, 1
    while place.exists():
        place, number = folder / f"{path.name}.{number}", number + 1
    path.rename(place)
    return place

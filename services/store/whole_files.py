"""Files that are there whole or not at all, whatever ends the process that writes them."""

import os
from pathlib import Path

from composer_mesh.actors.checkpoints.manifest import to_disk


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file as a whole; it is on the disk when this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    to_disk(path.parent)

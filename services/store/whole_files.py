"""Atomic file replacement: a file is complete or absent, however the writing process ends."""

import os
from pathlib import Path

from composer_mesh.actors.checkpoints.manifest import to_disk


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file atomically; it is on disk on return."""
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

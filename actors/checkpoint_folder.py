"""Checkpoints as folders of a run: their names, which are whole, which may go.

    checkpoints/step-20/          a policy in Hugging Face format and `training_state.pt`
    checkpoints/.step-30.1234/    a draft; the name without the dot exists only for a whole one

Paths and bytes only: what is in a checkpoint is `checkpoint`'s business, and nothing here loads
torch.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "checkpoints"
STATE_FILE = "training_state.pt"
KEPT = 2
"""Checkpoints that a run keeps: the newest, and one more should that be unreadable."""
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A whole checkpoint: the policy after `step` optimizer steps."""

    step: int
    folder: Path


def folder_of(root: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return root / FOLDER / f"step-{step}"


def checkpoints_of(root: Path) -> list[Checkpoint]:
    """The checkpoints of a run that training can go on from, oldest first."""
    folders = [state.parent for state in (root / FOLDER).glob(f"step-*/{STATE_FILE}")]
    named = [(_NAME.fullmatch(folder.name), folder) for folder in folders]
    return sorted(Checkpoint(int(name[1]), folder) for name, folder in named if name)


def newest(root: Path) -> Checkpoint | None:
    """The checkpoint that a restart begins from, None where the run has none."""
    return max(checkpoints_of(root), default=None)


def prune(root: Path, keep: int = KEPT) -> None:
    """Remove all but the newest checkpoints. A folder that this module did not make stays."""
    for checkpoint in checkpoints_of(root)[:-keep]:
        (checkpoint.folder / STATE_FILE).unlink()  # from now on it is no checkpoint
        shutil.rmtree(checkpoint.folder)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A draft to write into, which becomes `folder` when the block ends, and not before.

    Every byte is on disk before the name is. Drafts that a killed process left are removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".step-*"):
        shutil.rmtree(left)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir()
    try:
        yield draft
        for path in [*draft.rglob("*"), draft]:
            _to_disk(path)
        _take_the_place(draft, folder)
        _to_disk(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _take_the_place(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    former = folder.with_name(f".{folder.name}.former")
    folder.rename(former)
    draft.rename(folder)
    shutil.rmtree(former)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

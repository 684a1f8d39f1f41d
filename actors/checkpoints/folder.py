"""Checkpoints as folders of a run: their names, which are whole, which may go.

    checkpoints/step-20/          state/ (shards), training.json, manifest.json, beside a policy in
                                  Hugging Face format
    checkpoints/.step-30.7-1/     a draft; the name without the dot exists only for a whole one
    checkpoints/.step-20.former   what a draft replaces, for the moment between two renames
    quarantine/step-20            one that is damaged

Paths and bytes only: what is in a checkpoint is `state`'s business, and nothing here loads
torch.
"""

import itertools
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.checkpoints.manifest import (
    MANIFEST_FILE,
    Written,
    damage,
    to_disk,
    write_manifest,
)
from composer_mesh.actors.checkpoints.quarantine import quarantine

FOLDER = "checkpoints"
EARLIER_STATE_FILE = "training_state.pt"
"""What checkpoints of earlier versions have in place of shards and a manifest."""
_NAME = re.compile(r"step-(\d+)")
_FORMER = re.compile(r"\.step-(\d+)\.former")
_count = itertools.count()


class UnreadableCheckpoint(RuntimeError):
    """A checkpoint that training cannot go on from."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(folder, reason)

    def __str__(self) -> str:
        return (
            f"the checkpoint {self.args[0]} cannot be read ({self.args[1]}): move it away, and the "
            "run begins again from the one before it"
        )


class EarlierCheckpoint(RuntimeError):
    """A checkpoint of a version of this program that kept other things in it."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)

    def __str__(self) -> str:
        return (
            f"the checkpoint {self.args[0]} was written by an earlier version and has no state "
            "that this one can go on from: it is a model folder, so begin a new run with "
            f"policy.path = {self.args[0]!r}"
        )


class CheckpointFailed(RuntimeError):
    """A checkpoint that could not be written."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(folder, reason)

    def __str__(self) -> str:
        return (
            f"the checkpoint {self.args[0]} could not be written ({self.args[1]}): make room for "
            "it and go on with --resume, which begins at the one before it"
        )


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A checkpoint that was whole once: the policy after `step` optimizer steps."""

    step: int
    folder: Path


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint, where it was moved, and what is wrong with it."""

    checkpoint: Checkpoint
    moved_to: Path
    damage: list[str]


def folder_of(root: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return root / FOLDER / f"step-{step}"


def checkpoints_of(root: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first; their bytes are not looked at."""
    found: dict[int, Path] = {}
    for manifest in (root / FOLDER).glob(f"*step-*/{MANIFEST_FILE}"):
        folder = manifest.parent
        if name := _NAME.fullmatch(folder.name):
            found[int(name[1])] = folder
        elif name := _FORMER.fullmatch(folder.name):
            found.setdefault(int(name[1]), folder)
    return sorted(Checkpoint(step, folder) for step, folder in found.items())


def newest(root: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, None where it has none; its bytes are not looked at.

    Raises `EarlierCheckpoint` where there are only those of an earlier version.
    """
    found = max(checkpoints_of(root), default=None)
    if found is None:
        for state in sorted((root / FOLDER).glob(f"step-*/{EARLIER_STATE_FILE}")):
            raise EarlierCheckpoint(str(state.parent))
    return found


def newest_whole(root: Path) -> tuple[Checkpoint | None, list[SetAside]]:
    """The newest checkpoint of a run whose every byte is as it was written.

    Damaged ones that are newer are moved to the run's quarantine, and told. Raises as `newest`.
    """
    aside: list[SetAside] = []
    while (found := newest(root)) is not None:
        wrong = damage(found.folder)
        if not wrong:
            break
        aside.append(SetAside(found, quarantine(root, found.folder, f"step-{found.step}"), wrong))
    return found, aside


def prune(root: Path, keep: int, every: int = 0) -> None:
    """Remove all but the newest `keep` checkpoints and, where `every` is not 0, its multiples.

    A folder that this module did not make stays.
    """
    for checkpoint in checkpoints_of(root)[:-keep]:
        if not every or checkpoint.step % every:
            (checkpoint.folder / MANIFEST_FILE).unlink()  # from now on it is no checkpoint
            shutil.rmtree(checkpoint.folder)


class Draft:
    """A checkpoint that is being written into `folder`, and is none before `commit`."""

    def __init__(self, root: Path, step: int) -> None:
        """Make an empty folder. Drafts that a killed process left are removed."""
        self.step, self._place = step, folder_of(root, step)
        self._place.parent.mkdir(parents=True, exist_ok=True)
        for left in self._place.parent.glob(".step-*"):
            if not _FORMER.fullmatch(left.name):
                shutil.rmtree(left)
        self.folder = self._place.with_name(f".step-{step}.{os.getpid()}-{next(_count)}")
        self.folder.mkdir()

    def commit(self, files: Iterable[Written]) -> Checkpoint:
        """Make it the checkpoint of its step; `files` are all that belong to it, on disk."""
        for folder in [path for path in self.folder.rglob("*") if path.is_dir()]:
            to_disk(folder)
        write_manifest(self.folder, self.step, files)
        to_disk(self.folder)
        self._take_the_place()
        to_disk(self._place.parent)
        return Checkpoint(self.step, self._place)

    def discard(self) -> None:
        """Remove what was written of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take_the_place(self) -> None:
        """A kill between the renames leaves the former, which counts until this name is taken."""
        former = self._place.with_name(f".{self._place.name}.former")
        if self._place.exists():
            shutil.rmtree(former, ignore_errors=True)
            self._place.rename(former)
        self.folder.rename(self._place)
        shutil.rmtree(former, ignore_errors=True)

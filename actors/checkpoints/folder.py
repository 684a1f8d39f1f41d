"""Checkpoint folders of a run: their names, which are intact, which may be removed.

    checkpoints/step-20/          state/ (shards), training.json, manifest.json, and the policy in
                                  Hugging Face format
    checkpoints/.step-30.7-1/     a draft; renamed without the dot once it is complete
    checkpoints/.step-20.former   what a draft replaces, between the two renames
    quarantine/step-20            a damaged checkpoint

Handles paths and bytes only and does not load torch; the contents are in `state`.
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
    WrittenFile,
    damage,
    quarantine,
    to_disk,
    write_manifest,
)
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.open_folder import OpenFolder

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d+)")
_FORMER = re.compile(r"\.step-(\d+)\.former")
_count = itertools.count()


class UnreadableCheckpoint(Worded, RuntimeError):
    """A checkpoint that training cannot resume from: its folder and the reason."""

    message = (
        "the checkpoint {0} cannot be read ({1}): move it away, and the run restarts from "
        "the one before it"
    )


class CheckpointFailed(Worded, RuntimeError):
    """A checkpoint that could not be written: its folder and the reason."""

    message = (
        "the checkpoint {0} could not be written ({1}): free space for it and continue "
        "with --resume, which starts from the one before it"
    )


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A checkpoint that was completely written: the policy after `step` optimizer steps."""

    step: int
    folder: Path


@dataclass(frozen=True)
class QuarantinedCheckpoint:
    """A quarantined checkpoint, its new path, and its damage."""

    checkpoint: Checkpoint
    moved_to: Path
    damage: list[str]


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / FOLDER / f"step-{step}"


def checkpoints_of(root: Path) -> list[Checkpoint]:
    """Return a run's checkpoints, oldest first, without checking their contents."""
    found: dict[int, Path] = {}
    for manifest in (root / FOLDER).glob(f"*step-*/{MANIFEST_FILE}"):
        folder = manifest.parent
        if name := _NAME.fullmatch(folder.name):
            found[int(name[1])] = folder
        elif name := _FORMER.fullmatch(folder.name):
            found.setdefault(int(name[1]), folder)
    return sorted(Checkpoint(step, folder) for step, folder in found.items())


def newest(root: Path) -> Checkpoint | None:
    """Return a run's newest checkpoint, None if there is none, without checking its contents."""
    return max(checkpoints_of(root), default=None)


def newest_whole(root: Path) -> tuple[Checkpoint | None, list[QuarantinedCheckpoint]]:
    """Return a run's newest intact checkpoint, and the quarantined ones.

    Damaged checkpoints that are newer are moved to the run's quarantine.
    """
    aside: list[QuarantinedCheckpoint] = []
    while (found := newest(root)) is not None:
        wrong = damage(found.folder)
        if not wrong:
            break
        aside.append(
            QuarantinedCheckpoint(
                found, quarantine(root, found.folder, f"step-{found.step}"), wrong
            )
        )
    return found, aside


def prune(root: Path, keep: int, every: int = 0) -> None:
    """Remove all checkpoints but the newest `keep` and, if `every` is not 0, multiples of `every`.

    Folders that are not checkpoints of this module stay.
    """
    for checkpoint in checkpoints_of(root)[:-keep]:
        if not every or checkpoint.step % every:
            (checkpoint.folder / MANIFEST_FILE).unlink()  # from now on it is no checkpoint
            shutil.rmtree(checkpoint.folder)


class CheckpointDraft:
    """A checkpoint being written into `folder`; it counts only after `commit`."""

    def __init__(self, root: Path, step: int) -> None:
        """Create an empty folder; remove drafts that a killed process left."""
        self.step, self._place = step, folder_of(root, step)
        with OpenFolder(root) as opened:
            opened.make(FOLDER)
        for left in self._place.parent.glob(".step-*"):
            if not _FORMER.fullmatch(left.name):
                shutil.rmtree(left)
        self.folder = self._place.with_name(f".step-{step}.{os.getpid()}-{next(_count)}")
        self.folder.mkdir()

    def commit(self, files: Iterable[WrittenFile]) -> Checkpoint:
        """Turn the draft into its step's checkpoint; `files` are all its files, already on disk."""
        for folder in [path for path in self.folder.rglob("*") if path.is_dir()]:
            to_disk(folder)
        write_manifest(self.folder, self.step, files)
        to_disk(self.folder)
        self._take_the_place()
        to_disk(self._place.parent)
        return Checkpoint(self.step, self._place)

    def discard(self) -> None:
        """Remove the draft."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take_the_place(self) -> None:
        """Replace the former checkpoint; if killed in between, the `.former` folder counts."""
        former = self._place.with_name(f".{self._place.name}.former")
        if self._place.exists():
            shutil.rmtree(former, ignore_errors=True)
            self._place.rename(former)
        self.folder.rename(self._place)
        shutil.rmtree(former, ignore_errors=True)

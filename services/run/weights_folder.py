"""The folder in which one run keeps the files of the `disk` transport.

A run makes a new folder each time it starts, notes it in its own directory and marks it with that
directory's name. It removes only folders that it noted and that carry its mark, and in them only
what publishers of weights made; anything else stays and is an event.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from composer_mesh.mesh.supervision import Recorder
from composer_mesh.mesh.weights.errors import TransportUnavailable
from composer_mesh.mesh.weights.transports.disk import FOLDER_PREFIX
from composer_mesh.services.store.whole_files import write_whole

NOTES_FILE = ".weights-folders"
"""In the run's directory: a line for each folder that the run has made and not yet removed."""
OWNER_FILE = "owner.txt"
"""In the folder: the run directory that owns it."""


class FolderKept(Exception):
    """A folder is not removed: why not."""


@asynccontextmanager
async def weights_folder(root: Path, parent: Path | None, record: Recorder) -> AsyncIterator[Path]:
    """A new folder for the run in `root`, under `parent` if one is given; it goes with the block.

    What an earlier process of this run left is removed first. What cannot be removed is the event
    `weights_kept`, and is tried again by the next start.
    """
    folders = RunFolders(root)
    await _remove(folders, record)
    folder = folders.make(parent)
    try:
        yield folder
    finally:
        await _remove(folders, record)


async def _remove(folders: "RunFolders", record: Recorder) -> None:
    for folder, why in await asyncio.to_thread(folders.remove):
        record("weights_kept", "", f"{folder} is not removed: {why}")


class RunFolders:
    """The folders that the run of one directory has made and not yet removed."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._notes = self._root / NOTES_FILE

    def make(self, parent: Path | None) -> Path:
        """Make a folder of a name that nothing has had before, and mark it.

        Raises `TransportUnavailable` with the repair where there can be none.
        """
        name = f"{'weights' if parent is None else self._root.name}-{secrets.token_hex(8)}"
        folder = (self._root if parent is None else parent.absolute()) / name
        self._note(
            [*self._noted(), folder]
        )  # before it is made, so that a kill leaves none unknown
        try:
            folder.mkdir(parents=True)
            write_whole(folder / OWNER_FILE, f"{self._root}\n".encode())
        except OSError as error:
            repair = "set weights.folder to a folder that the run may write to"
            why = f"{folder} cannot be made ({error.strerror})"
            raise TransportUnavailable("disk", why, repair) from error
        return folder

    def remove(self) -> list[tuple[Path, str]]:
        """Remove them all; those that stay, each with the reason."""
        kept = []
        for folder in self._noted():
            try:
                self._remove(folder)
            except (FolderKept, OSError) as error:
                kept.append((folder, str(error)))
        self._note([folder for folder, _ in kept])
        return kept

    def _remove(self, folder: Path) -> None:
        if not folder.exists():
            return
        owner = folder / OWNER_FILE
        if owner.exists():
            self._check_owner(owner)
            for made in folder.glob(f"{FOLDER_PREFIX}*"):
                shutil.rmtree(made)
        own = [owner, *folder.glob(f".{OWNER_FILE}.*")]  # a kill leaves a draft of it
        if others := sorted({one.name for one in folder.iterdir()} - {one.name for one in own}):
            raise FolderKept(f"the run did not make {', '.join(others)}: move that away")
        for one in own:
            one.unlink(missing_ok=True)
        folder.rmdir()

    def _check_owner(self, owner: Path) -> None:
        named = owner.read_text().strip()
        if named != str(self._root):
            raise FolderKept(f"it belongs to the run in {named}")

    def _noted(self) -> list[Path]:
        if not self._notes.exists():
            return []
        return [Path(line) for line in self._notes.read_text().splitlines()]

    def _note(self, folders: list[Path]) -> None:
        if folders:
            write_whole(self._notes, "".join(f"{folder}\n" for folder in folders).encode())
        else:
            self._notes.unlink(missing_ok=True)

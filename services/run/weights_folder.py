"""The folder in which one run stores the files of the `disk` transport.

A run makes a new folder at each start, lists it in its own directory and marks it with that
directory's name. It removes only folders that it listed and that carry its mark, and in them only
the files of weight publishers; anything else is left and recorded as an event.

The weight transport of a run: chosen once at its start, the same for every actor.
"""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.supervision import Recorder
from composer_mesh.mesh.weights.choice import Transport, choose
from composer_mesh.mesh.weights.manifest import TransportUnavailable
from composer_mesh.mesh.weights.transports import FOLDER_PREFIX
from composer_mesh.planning.mesh_layout import host_count

NOTES_FILE = ".weights-folders"
"""File in the run's directory: one line per folder that the run made and has not removed."""
OWNER_FILE = "owner.txt"
"""File in the folder: the run directory that owns it."""


class FolderKept(Exception):
    """A folder was not removed; the message is the reason."""


@asynccontextmanager
async def weights_folder(root: Path, parent: Path | None, record: Recorder) -> AsyncIterator[Path]:
    """Make a folder for the run in `root`, under `parent` if given; removed after the block.

    Leftovers of earlier processes of this run are removed first. A failed removal is recorded as
    event `weights_kept` and retried at the next start.
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
        """Make and mark a folder with a unique name.

        Raises `TransportUnavailable` with the repair if that fails.
        """
        name = f"{'weights' if parent is None else self._root.name}-{secrets.token_hex(8)}"
        folder = (self._root if parent is None else parent.absolute()) / name
        self._note(
            [*self._noted(), folder]
        )  # listed before it is made, so that a kill leaves none unlisted
        try:
            folder.mkdir(parents=True)
            write_whole(folder / OWNER_FILE, f"{self._root}\n".encode())
        except OSError as error:
            repair = "set weights.folder to a folder that the run may write to"
            why = f"{folder} cannot be made ({error.strerror})"
            raise TransportUnavailable("disk", why, repair) from error
        return folder

    def remove(self) -> list[tuple[Path, str]]:
        """Remove all folders; return the remaining ones with the reasons."""
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
        own = [owner, *folder.glob(f".{OWNER_FILE}.*")]  # a kill leaves a temporary file of it
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


@asynccontextmanager
async def settled(
    config: Config, root: Path, record: Recorder, hosts: int | None = None
) -> AsyncIterator[tuple[Config, Transport]]:
    """Yield the config with its transport named, and the choice; `root` is the run directory.

    `hosts` is the run's host count if the config does not give it. Raises `TransportUnavailable`
    with the repair. `disk` has a folder owned by the run while the block runs.
    """
    transport = choose(config.weights, host_count(config) if hosts is None else hosts)
    if transport.name != "disk":
        yield _named(config, transport, config.weights.folder), transport
        return
    async with weights_folder(root, config.weights.folder, record) as folder:
        yield _named(config, transport, folder), transport


def _named(config: Config, transport: Transport, folder: Path | None) -> Config:
    named = {"transport": transport.name, "folder": folder}
    return config.model_copy(update={"weights": config.weights.model_copy(update=named)})

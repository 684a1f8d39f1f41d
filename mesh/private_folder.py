"""The private temporary folder of a run on one machine: 0700, and removed even after a crash.

Everything that a run keeps outside its run directory lies in it: sockets, TLS keys, the files of
Monarch and Monarch's log. The process that starts a run makes the folder and passes its path to
its children by the environment (`PRIVATE`, and `TMPDIR` for libraries). It holds a lock on the
file `owner` in it for as long as it lives, however it ends; a later start removes the folders of
its own user whose lock is free. Imports neither Monarch nor torch.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

PRIVATE = "COMPOSER_MESH_PRIVATE"
"""Environment variable with the folder, set for all processes of a run on a machine."""
PREFIX = "composer-mesh-run-"
ENTERED = "composer-mesh-box-"
"""Begin of the names of folders that other users of the machine may enter, but not list."""
OWNER = "owner"
LONGEST_PATH = 64
"""Characters; the path of a Unix socket below it must fit into 107."""
TRIES = 20


class PrivateFolderRefused(Exception):
    """No private folder can be made there: the value, the bound and the repair."""


@dataclass(frozen=True)
class _Own:
    folder: Path
    lock: int
    pid: int


_owned: list[_Own] = []
_one_at_a_time = threading.Lock()


def private_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Return the private folder of this process: its starter's, else one that it makes and owns.

    Making one also removes the folders that processes of this user left when they were killed. An
    owned folder is removed when this process ends.
    """
    with _one_at_a_time:
        if inherited := environ.get(PRIVATE):
            folder = Path(inherited)
            if _is_private(folder):
                return folder
        return _own_folder(environ)


def subfolder(name: str) -> Path:
    """Return a folder of that name in the private folder, made if it is missing."""
    folder = private_folder() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def own_private_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Return a private folder that this process owns, for a run that it starts.

    From here on, this process and its children put temporary files into it.
    """
    with _one_at_a_time:
        folder = _own_folder(environ)
    environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # it was chosen before, if anything requested it
    return folder


def entered_folder() -> Path:
    """Make a folder in which other users reach what they know the name of; they list nothing.

    It is removed when this process ends, or by the next one that makes such a folder.
    """
    with _one_at_a_time:
        base = _base()
        if not _is_entered(base):
            base = next(one for one in SHARED if _is_entered(one))
        own = _make(base, ENTERED)
        own.folder.chmod(0o711)
        atexit.register(_remove, own)
        return own.folder


SHARED = (Path("/tmp"), Path("/var/tmp"))


def _is_entered(base: Path) -> bool:
    """Whether all users may enter a folder and those that it lies in."""
    return all(one.stat().st_mode & 0o001 for one in (base, *base.parents))


def remove_abandoned(base: Path, prefix: str = PREFIX) -> list[Path]:
    """Remove the folders that dead processes of this user left in `base`; return which.

    Folders of other users, links, and folders whose owner lives are left alone.
    """
    return [one for one in sorted(base.glob(f"{prefix}*")) if _remove_if_abandoned(one)]


def _own_folder(environ: MutableMapping[str, str]) -> Path:
    base = _base()
    mine = (one for one in _owned if one.pid == os.getpid() and one.folder.parent == base)
    if (own := next(mine, None)) is None:
        own = _make(base)
        _owned.append(own)
        atexit.register(_remove, own)
    environ[PRIVATE] = str(own.folder)
    return own.folder


def _base() -> Path:
    """Return where private folders are made; refuse one in which others could replace them."""
    # A folder that was inherited and is gone cannot hold another.
    outside = Path(tempfile.gettempdir())
    while outside.name.startswith(PREFIX):
        outside = outside.parent
    mode = outside.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise PrivateFolderRefused(
            f"{outside} has mode {stat.S_IMODE(mode):04o}, so other users could replace its "
            f"contents: chmod +t {outside}, or set TMPDIR to a folder of your own"
        )
    if len(str(outside / PREFIX)) + 8 > LONGEST_PATH:
        raise PrivateFolderRefused(
            f"{outside} is too long a path for the sockets of a run, which lie below it: set "
            f"TMPDIR to one of at most {LONGEST_PATH - len(PREFIX) - 9} characters"
        )
    return outside


def _make(base: Path, prefix: str = PREFIX) -> _Own:
    remove_abandoned(base, prefix)
    for _ in range(TRIES):
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        if (lock := _claim(folder)) is not None:
            return _Own(folder, lock, os.getpid())
    raise PrivateFolderRefused(
        f"{TRIES} folders made in {base} disappeared at once: stop what removes them, or set "
        "TMPDIR to another folder"
    )


def _claim(folder: Path) -> int | None:
    """Lock a new folder; None if another start took it for an abandoned one in between."""
    try:
        lock = os.open(folder / OWNER, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), os.lstat(folder / OWNER)):
            return lock
    os.close(lock)
    return None


def _is_private(folder: Path, others: int = 0) -> bool:
    """Whether a folder is this user's, and other users have no more than these rights."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & 0o077 & ~others


def _remove_if_abandoned(folder: Path) -> bool:
    if not _is_private(folder, 0o011 if folder.name.startswith(ENTERED) else 0):
        return False
    with _lock_of_the_dead(folder) as dead:
        if dead:
            _remove_all_of(folder)
    return dead and not folder.exists()


@contextlib.contextmanager
def _lock_of_the_dead(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock if its owner is dead; tell whether it is."""
    try:
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # killed before it was claimed, and empty, or about to be claimed
        with contextlib.suppress(OSError):
            folder.rmdir()
        yield False
        return
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(lock)


def _remove(own: _Own) -> None:
    if own.pid == os.getpid():  # a fork of the owner leaves it alone
        _remove_all_of(own.folder)
        os.close(own.lock)


def _remove_all_of(folder: Path) -> None:
    """Remove a folder, its owner's file last: the next start continues where this one is killed."""
    with contextlib.suppress(OSError):
        for one in sorted(folder.iterdir()):
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != OWNER:
                one.unlink(missing_ok=True)
        if [one.name for one in folder.iterdir()] == [OWNER]:
            shutil.rmtree(folder, ignore_errors=True)

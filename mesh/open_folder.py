"""Writes below one folder through its handle, for folders that somebody else may have filled.

A run's folder can be a stranger's, as an unpacked archive is. A link below it would lead each write
to a file of the user's own, so every write goes through `OpenFolder`, which follows none. Programs
of others (SQLite, trackers, safetensors) open files by path: `refuse_links` looks at the complete
folder before any of them starts. The folder itself may be reached through a link.

Atomic file replacement: a file is complete or absent, however the writing process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Self

from composer_mesh.configs.regular_files import UnusableFile, unusual

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe is not waited for; regular files do not know O_NONBLOCK."""
_LINK_REFUSED = (errno.ELOOP, errno.ENOTDIR, errno.EMLINK)


class OpenFolder:
    """A folder with an open handle, in a `with` block. Names are relative, such as `a/b.json`.

    All methods raise OSError with the complete path; for a link below the folder its text ends with
    the repair.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, _FOLDER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle; a second call does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def make(self, name: str) -> None:
        """Make a folder below this one, and those above it, unless it exists."""
        with self._inside(f"{name}/."):
            pass

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a regular file; return its descriptor. Makes missing folders with O_CREAT."""
        with self._inside(name, make=bool(flags & os.O_CREAT)) as (folder, file):
            descriptor = os.open(file, flags | _NO_LINK, mode, dir_fd=folder)
            found = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(found):
                os.close(descriptor)
                raise unusual(self.path / name, found)
            return descriptor

    def append(self, name: str) -> FileIO:
        """Open a file for appending, unbuffered; it is created if it is missing."""
        return FileIO(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")

    def write_whole(
        self, name: str, content: bytes, *, synced: bool = True, mode: int = 0o666
    ) -> None:
        """Replace a file atomically, with at most these rights; if `synced`, it is then on disk."""
        path = PurePosixPath(name)
        draft = str(path.with_name(f".{path.name}.{os.getpid()}"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with self._inside(name, make=True) as (folder, file):
            try:
                with FileIO(self.open(draft, flags, mode), "wb") as written:
                    left = memoryview(content)
                    while left:
                        left = left[written.write(left) :]
                    if synced:
                        os.fsync(written.fileno())
                rename = PurePosixPath(draft).name
                os.replace(rename, file, src_dir_fd=folder, dst_dir_fd=folder)
                if synced:
                    os.fsync(folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(PurePosixPath(draft).name, dir_fd=folder)
                raise

    @contextlib.contextmanager
    def _inside(self, name: str, make: bool = True) -> Iterator[tuple[int, str]]:
        """Yield the handle of the folder that contains a name, and the name's last part."""
        *folders, file = name.split("/")
        with contextlib.ExitStack() as opened, self._errors_named(name):
            handle = self._handle
            for folder in folders:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, dir_fd=handle)
                handle = os.open(folder, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
                opened.callback(os.close, handle)
            yield handle, file

    @contextlib.contextmanager
    def _errors_named(self, name: str) -> Iterator[None]:
        try:
            yield
        except UnusableFile:
            raise
        except OSError as error:
            if error.errno in _LINK_REFUSED:
                for part in [self.path / name, *(self.path / name).parents]:
                    if part == self.path:
                        break
                    if part.is_symlink():
                        raise link_refused(part) from None
            raise type(error)(error.errno, error.strerror, str(self.path / name)) from None


def refuse_links(folder: Path) -> None:
    """Raise OSError for a link below a folder that leads out of it; reads all its folders.

    A link to a file of the folder itself, as trackers make, stays.
    """
    inside = os.path.realpath(folder)
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if os.path.commonpath([inside, target]) != inside:
                        raise link_refused(Path(entry.path))


def link_refused(path: Path) -> UnusableFile:
    """Return the error for a link where a file or a folder is written."""
    try:
        target = str(path.readlink())
    except OSError:
        target = "another place"
    said = (
        f"{path} is a link to {target[:200]!r}, and nothing is written through a link below the "
        "folder of a run: remove the link, or replace it by its target"
    )
    return UnusableFile(errno.ELOOP, said, str(path))


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically, also where it is a link; it is on disk on return.

    Nobody has rights beyond `mode` from its creation on.
    """
    with OpenFolder(path.parent) as folder:
        folder.write_whole(path.name, content, mode=mode)

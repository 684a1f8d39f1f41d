"""Reads regular files of a limited size, for files that somebody else may have written.

Opening a FIFO waits for a writer, a device never ends, and a file of many gigabytes fills the
memory. All of them are refused with an OSError here, before anything is read.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class UnusableFile(OSError):
    """A file that is not read: no regular file, or one that is too long."""

    def __str__(self) -> str:
        return str(self.strerror or self.args[0])


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading, without waiting; raises OSError for anything else.

    With `follow` False a symbolic link is refused too.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise unusual(path, mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def unusual(path: Path, mode: int) -> UnusableFile:
    """Return the error for a file of this mode, which is neither regular nor a folder."""
    said = f"{path.name} is a {_kind(mode)} and not a regular file"
    return UnusableFile(errno.EINVAL, said, str(path))


def read_regular(path: Path, most: int, *, follow: bool = True) -> bytes:
    """Return a file's content; raises OSError unless it is regular with at most `most` bytes."""
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
        if size > most or len(content) > most:
            said = f"{path.name} has {size} bytes but at most {most} are read"
            raise UnusableFile(errno.EFBIG, said, str(path))
        return content


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "FIFO", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
    return kinds.get(stat.S_IFMT(mode), "socket")

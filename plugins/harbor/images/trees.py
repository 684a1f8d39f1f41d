"""Removes and copies trees that a stranger filled: no link is followed, no depth exhausts us.

Imports only the standard library.
"""

from __future__ import annotations

import errno
import os
import stat

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DEEPEST = 300
"""Folders within folders that are open at a time, or copied."""
CHUNK = 1 << 20


def remove_entry(parent: int, name: str) -> None:
    """Remove what has a name in the open folder `parent`, if it is there."""
    if not _unlinked(parent, name):
        _Removal(parent).run(name)


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """Remove a path with all below it, if it is there."""
    above, name = os.path.split(os.path.abspath(folder))  # noqa: PTH100
    try:
        parent = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_entry(parent, name)
    finally:
        os.close(parent)


class _Removal:
    """Removes one folder of `parent`; what lies deeper than `DEEPEST` is moved up to it first."""

    def __init__(self, parent: int) -> None:
        self._parent, self._moved = parent, 0
        self._waiting: list[str] = []

    def run(self, name: str) -> None:
        self._waiting.append(name)
        while self._waiting:
            self._folder(self._parent, self._waiting.pop(), 0)

    def _folder(self, parent: int, name: str, depth: int) -> None:
        folder = _entered(parent, name)
        try:
            for one in os.listdir(folder):  # noqa: PTH208
                if _unlinked(folder, one):
                    continue
                if depth < DEEPEST:
                    self._folder(folder, one, depth + 1)
                else:
                    self._move_up(folder, one)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=parent)

    def _move_up(self, folder: int, name: str) -> None:
        self._moved += 1
        place = f".removed-{os.getpid()}-{self._moved}"
        os.rename(name, place, src_dir_fd=folder, dst_dir_fd=self._parent)
        self._waiting.append(place)


def _unlinked(parent: int, name: str) -> bool:
    """Remove an entry that is no folder; return whether there is none left of that name."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except (IsADirectoryError, PermissionError):  # the kernel has either for a folder
        if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise
        return False
    return True


def _entered(parent: int, name: str) -> int:
    """Open a folder, with the rights to change it where its owner has none."""
    try:
        folder = os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:
        os.chmod(
            name, 0o700, dir_fd=parent
        )  # a folder of ours: links are refused when it is opened
        folder = os.open(name, FOLDER, dir_fd=parent)
    if os.fstat(folder).st_uid == os.geteuid():
        os.fchmod(folder, 0o700)
    return folder


def copy_tree(source: int, target: int) -> None:
    """Copy all of one open folder into another empty one, which gets its owner and mode, too.

    Hard links stay links of each other. Sockets are left out.
    """
    _Copy(target).folder(source, target, "", 0)


class _Copy:
    def __init__(self, root: int) -> None:
        self._root = root
        self._linked: dict[tuple[int, int], str] = {}

    def folder(self, source: int, target: int, path: str, depth: int) -> None:
        if depth > DEEPEST:
            raise OSError(errno.ENAMETOOLONG, f"folders are nested deeper than {DEEPEST}", path)
        for name in os.listdir(source):
            found = os.stat(name, dir_fd=source, follow_symlinks=False)
            here = f"{path}/{name}".lstrip("/")
            if stat.S_ISDIR(found.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                inner = os.open(name, FOLDER, dir_fd=source)
                outer = os.open(name, FOLDER, dir_fd=target)
                try:
                    self.folder(inner, outer, here, depth + 1)
                finally:
                    os.close(inner)
                    os.close(outer)
            elif not self._link(found, here):
                self._other(source, target, name, found)
        _finish(source, target)

    def _link(self, found: os.stat_result, path: str) -> bool:
        """Link a path to an earlier copy of the same file, if there is one."""
        if found.st_nlink < 2:
            return False
        first = self._linked.setdefault((found.st_dev, found.st_ino), path)
        if first == path:
            return False
        os.link(first, path, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        return True

    def _other(self, source: int, target: int, name: str, found: os.stat_result) -> None:
        mode = found.st_mode
        if stat.S_ISREG(mode):
            return _copy_file(source, target, name)
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISFIFO(mode):
            os.mkfifo(name, mode & 0o7777, dir_fd=target)
        elif stat.S_ISCHR(mode) and found.st_rdev == 0:  # what a file system of layers hides
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        else:
            return None
        os.chown(name, found.st_uid, found.st_gid, dir_fd=target, follow_symlinks=False)
        return None


def _copy_file(source: int, target: int, name: str) -> None:
    inner = os.open(name, FILE, dir_fd=source)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    outer = os.open(name, flags, 0o600, dir_fd=target)
    try:
        while piece := os.read(inner, CHUNK):
            left = memoryview(piece)
            while left:
                left = left[os.write(outer, left) :]
        _finish(inner, outer)
    finally:
        os.close(inner)
        os.close(outer)


def _finish(source: int, target: int) -> None:
    """Give an open copy the owner, mode, attributes and times of its source."""
    found = os.fstat(source)
    os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    for name in os.listxattr(source):
        if name.startswith("user."):
            os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))

"""Applies the layers of an image to a folder, as an archive of a stranger is: nothing gets out.

Every path is resolved by the kernel inside the folder (`openat2` with RESOLVE_IN_ROOT), so that no
name, link or hard link of an archive leads out of it. Devices, sockets and extended attributes are
left out and counted. Entries and bytes are bounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from composer_mesh.plugins.harbor.images.manifest import invalid
from composer_mesh.plugins.harbor.images.trees import remove_entry

OPENAT2 = 437
RESOLVE_NO_MAGICLINKS, RESOLVE_IN_ROOT = 0x02, 0x10
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
MOST_ENTRIES = 2_000_000
MOST_BYTES = 64 << 30
MOST_HEADER_BYTES = 1 << 20
DEEPEST = 250
CHUNK = 1 << 20
LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
Owner = tuple[int, int]


class BoundedTarInfo(tarfile.TarInfo):
    """A member whose extended header fits into memory."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> BoundedTarInfo:
        """Read a header; raises ContainerError for one that is too long."""
        found = super().frombuf(buf, encoding, errors)
        if found.type in LONG and found.size > MOST_HEADER_BYTES:
            raise invalid(f"an archive has a header of {found.size:,} bytes")
        return found


@dataclass
class LeftOut:
    """What of an image was not unpacked."""

    devices: int = 0
    attributes: int = 0

    def __str__(self) -> str:
        return f"{self.devices} devices and sockets, {self.attributes} extended attributes"


@dataclass
class Root:
    """A folder that layers are applied to, bottom first.

    `owner` turns the owner that an archive names into one of this machine, or is None where this
    process may not change owners.
    """

    folder: Path
    owner: Callable[[int, int], Owner] | None
    most_entries: int = MOST_ENTRIES
    most_bytes: int = MOST_BYTES
    left_out: LeftOut = field(default_factory=LeftOut)
    _entries: int = 0
    _bytes: int = 0
    _folders: dict[str, tuple[int, Owner, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._handle = os.open(self.folder, FOLDER)

    def close(self) -> None:
        """Give folders their modes and owners, which could have kept us out, and close."""
        try:
            for path in sorted(self._folders, reverse=True):
                self._finish_folder(path, *self._folders[path])
        finally:
            os.close(self._handle)

    def apply(self, layer: IO[bytes]) -> None:
        """Apply an uncompressed archive; raises ContainerError for one that is none."""
        own: set[str] = set()
        try:
            with tarfile.open(fileobj=layer, mode="r|", tarinfo=BoundedTarInfo) as archive:
                for member in archive:
                    self._count()
                    self._add(archive, member, own)
        except (tarfile.TarError, EOFError, ValueError, struct.error) as error:
            raise invalid(f"a layer is no whole archive: {error}") from None

    def _count(self) -> None:
        self._entries += 1
        if self._entries > self.most_entries:
            raise invalid(f"an image has more than {self.most_entries:,} entries")

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, own: set[str]) -> None:
        path = plain_path(member.name)
        if not path:
            return self._note_folder("", member)
        above, _, name = path.rpartition("/")
        with self._opened(above) as parent:
            if name == OPAQUE:
                return self._hide_lower(parent, above, own)
            if name.startswith(WHITEOUT):
                hidden = name.removeprefix(WHITEOUT)
                if hidden in ("", ".", ".."):
                    raise invalid(f"an archive hides {path[:300]!r}")
                return self._hide(parent, hidden, f"{above}/{hidden}".lstrip("/"), own)
            parts = path.split("/")
            own.update("/".join(parts[: place + 1]) for place in range(len(parts)))
            self._make(archive, member, parent, name, path)
        return None

    def _make(
        self,
        archive: tarfile.TarFile,
        member: tarfile.TarInfo,
        parent: int,
        name: str,
        path: str,
    ) -> None:
        """Make one entry in place of what is there."""
        self.left_out.attributes += any(
            one.startswith("SCHILY.xattr") for one in member.pax_headers
        )
        if member.isdir():
            return self._make_folder(member, parent, name, path)
        if member.isdev() and not member.isfifo():
            self.left_out.devices += 1
            return None
        if member.islnk():
            return self._link(member, parent, name, path)
        self._clear(parent, name, path)
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
        elif member.isreg():
            self._write(archive, member, parent, name)
        else:
            raise invalid(f"an archive has {path[:300]!r} of the unknown type {member.type!r}")
        return self._finish(member, parent, name)

    def _write(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str
    ) -> None:
        source = archive.extractfile(member)
        assert source is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=0) as file:  # noqa: PTH123
            while piece := source.read(CHUNK):
                self._bytes += len(piece)
                if self._bytes > self.most_bytes:
                    raise invalid(f"an image has more than {self.most_bytes:,} bytes")
                file.write(piece)

    def _link(self, member: tarfile.TarInfo, parent: int, name: str, path: str) -> None:
        """Make a hard link to a file of the folder; its mode is that of the file."""
        target = plain_path(member.linkname)
        if target == path:
            return
        above, _, last = target.rpartition("/")
        self._clear(parent, name, path)
        try:
            with self._opened(above, make=False) as source:
                os.link(last, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            raise invalid(f"an archive links {path[:300]!r} to {target[:300]!r}") from None

    def _make_folder(self, member: tarfile.TarInfo, parent: int, name: str, path: str) -> None:
        if not stat.S_ISDIR(_mode(parent, name)):
            self._clear(parent, name, path)
            os.mkdir(name, 0o700, dir_fd=parent)
        self._note_folder(path, member)

    def _note_folder(self, path: str, member: tarfile.TarInfo) -> None:
        if member.isdir():
            owner = (member.uid, member.gid)
            self._folders[path] = (member.mode & 0o7777, owner, member.mtime)

    def _finish(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        """Give a new entry its owner, mode and time."""
        if self.owner is not None:
            os.chown(
                name, *self.owner(member.uid, member.gid), dir_fd=parent, follow_symlinks=False
            )
        if not member.issym():  # nothing else is there: it has just been made
            os.chmod(name, member.mode & 0o7777, dir_fd=parent)
        times = (_time(member.mtime), _time(member.mtime))
        os.utime(name, times, dir_fd=parent, follow_symlinks=False)

    def _finish_folder(self, path: str, mode: int, owner: Owner, mtime: float) -> None:
        above, _, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with self._opened(above, make=False) as parent:
                folder = os.open(name or ".", FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            try:
                if self.owner is not None:
                    os.fchown(folder, *self.owner(*owner))
                os.fchmod(folder, mode)
                os.utime(folder, (_time(mtime), _time(mtime)))
            finally:
                os.close(folder)

    def _clear(self, parent: int, name: str, path: str) -> None:
        """Remove what lies at a path, whatever it is."""
        mode = _mode(parent, name)
        if stat.S_ISDIR(mode):
            remove_entry(parent, name)
            below = f"{path}/"
            kept = self._folders.items()
            self._folders = {
                one: how for one, how in kept if one != path and not one.startswith(below)
            }
        elif mode:
            os.unlink(name, dir_fd=parent)

    def _hide(self, parent: int, name: str, path: str, own: set[str]) -> None:
        """Remove what lower layers have at a path; what this layer added stays.

        `own` has the paths of the layer, and the folders that they lie in.
        """
        if path not in own:
            return self._clear(parent, name, path)
        if stat.S_ISDIR(_mode(parent, name)):
            folder = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            try:
                self._hide_lower(folder, path, own)
            finally:
                os.close(folder)
        return None

    def _hide_lower(self, folder: int, path: str, own: set[str]) -> None:
        for name in os.listdir(folder):
            self._hide(folder, name, f"{path}/{name}".lstrip("/"), own)

    @contextlib.contextmanager
    def _opened(self, path: str, make: bool = True) -> Any:
        """Yield a folder below the root, made with those above it if it is missing."""
        folder = self._open(path, make)
        try:
            yield folder
        finally:
            os.close(folder)

    def _open(self, path: str, make: bool) -> int:
        try:
            return open_in_root(self._handle, path or ".", FOLDER)
        except FileNotFoundError:
            above, _, name = path.rpartition("/")
            if not make or not name:
                raise
            with self._opened(above) as parent:
                try:
                    os.mkdir(name, 0o755, dir_fd=parent)
                except FileExistsError:
                    raise invalid(f"an archive has entries below the link {path[:300]!r}") from None
                if self.owner is not None:
                    os.chown(name, *self.owner(0, 0), dir_fd=parent, follow_symlinks=False)
                return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            if make and error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise invalid(f"an archive has entries below {path[:300]!r}: {error}") from None
            raise


def plain_path(name: str) -> str:
    """Return a member's path without leading, doubled or single-dot parts.

    Raises ContainerError for one that leads upwards or is no path.
    """
    parts = [one for one in name.split("/") if one not in ("", ".")]
    if ".." in parts or "\0" in name or len(parts) > DEEPEST:
        raise invalid(
            f"an archive has the path {name[:300]!r}, which leads out of it or is too deep"
        )
    return "/".join(parts)


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open a path as if the folder `root` was the file system's; raises OSError."""
    how = struct.pack("QQQ", flags, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    found = _libc.syscall(
        ctypes.c_long(OPENAT2),
        ctypes.c_int(root),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_char_p(how),
        ctypes.c_size_t(len(how)),
    )
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(found)


def _mode(parent: int, name: str) -> int:
    """Return the kind and mode of what lies there, 0 where nothing does."""
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _time(mtime: float) -> float:
    return min(max(float(mtime), 0.0), float(1 << 33))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

"""Images on disk: OCI layouts, archives of both families, and plain folders."""

from __future__ import annotations

import contextlib
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images import manifest as format_of
from composer_mesh.plugins.harbor.images.layers import BoundedTarInfo, plain_path
from composer_mesh.plugins.harbor.images.manifest import Descriptor, invalid
from composer_mesh.plugins.harbor.images.reference import DiskReference

REFERENCE_NAME = "org.opencontainers.image.ref.name"
Opener = Callable[[Descriptor], contextlib.AbstractContextManager[IO[bytes]]]


class Layout:
    """An image layout: `read` returns a file of it by relative path, `open` opens one."""

    def __init__(self, reference: DiskReference, files: FolderFiles | ArchiveFiles) -> None:
        self._reference, self._files = reference, files

    def find(self) -> Descriptor:
        """Return the manifest or index of the reference's name, or the only one."""
        index = format_of.loaded(self._files.read("index.json"), f"{self._reference.path}")
        entries = [one for one in index.get("manifests") or [] if isinstance(one, dict)]
        names = [str((one.get("annotations") or {}).get(REFERENCE_NAME, "")) for one in entries]
        wanted = self._reference.name
        found = [entry for entry, name in zip(entries, names, strict=True) if wanted in ("", name)]
        if len(found) != 1:
            raise ContainerError(
                "image_missing",
                f"{self._reference.path} has {len(found)} images named {wanted!r}; it has "
                f"{', '.join(map(repr, names))[:500] or 'none'}",
            )
        return format_of.descriptor(found[0], f"an image of {self._reference.path}")

    def read(self, wanted: Descriptor) -> bytes:
        """Return a small blob, unverified."""
        return self._files.read(_blob(wanted))

    def open(self, wanted: Descriptor) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a blob."""
        return self._files.open(_blob(wanted))


def _blob(wanted: Descriptor) -> str:
    return f"blobs/{wanted.digest.replace(':', '/')}"


class FolderFiles:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        """Return a file's bytes; raises ContainerError where there is none, or it is large."""
        with self.open(name) as file:
            return _bounded(file, f"{self._folder / name}")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file."""
        try:
            file = (self._folder / name).open("rb")
        except (FileNotFoundError, NotADirectoryError):
            raise ContainerError("image_missing", f"{self._folder / name} does not exist") from None
        with file:
            yield file


class ArchiveFiles:
    """Files of an uncompressed or gzip archive, found by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = tarfile.open(path, "r:*", tarinfo=BoundedTarInfo)  # noqa: SIM115 kept
            found = [one for one in self._archive if one.isreg() or one.issym() or one.islnk()]
        except (FileNotFoundError, IsADirectoryError):
            raise ContainerError("image_missing", f"there is no archive {path}") from None
        except (tarfile.TarError, EOFError, ValueError, OSError) as error:
            raise invalid(f"{path} is no archive: {error}") from None
        self._members = {plain_path(one.name): one for one in found}

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()

    def read(self, name: str) -> bytes:
        """Return a file's bytes; raises ContainerError where there is none, or it is large."""
        with self.open(name) as file:
            return _bounded(file, f"{name} in {self._path}")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file."""
        member = self._members.get(plain_path(name))
        if member is not None and not member.isreg():  # a layer that is that of another image
            above = os.path.dirname(member.name) if member.issym() else ""  # noqa: PTH120 a name
            target = os.path.normpath(os.path.join(above, member.linkname))  # noqa: PTH118
            member = self._members.get(target)
        if member is None or not member.isreg():
            raise ContainerError("image_missing", f"{self._path} has no file {name[:300]!r}")
        source = self._archive.extractfile(member)
        assert source is not None
        with source:
            yield source


def docker_archive(reference: DiskReference, files: ArchiveFiles) -> tuple[bytes, list[str]]:
    """Return the config of an image of a `docker save` archive, and the names of its layers."""
    import json

    what = f"manifest.json of {reference.path}"
    try:
        entries = json.loads(files.read("manifest.json"))
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what} is no JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise invalid(f"{what} is no list of images")
    tags = [[str(tag) for tag in one.get("RepoTags") or []] for one in entries]
    found = [
        entry
        for entry, own in zip(entries, tags, strict=True)
        if not reference.name or any(_same(tag, reference.name) for tag in own)
    ]
    if len(found) != 1:
        raise ContainerError(
            "image_missing",
            f"{reference.path} has {len(found)} images named {reference.name!r}; it has "
            f"{', '.join(tag for own in tags for tag in own)[:500] or 'no names'}",
        )
    config, layers = found[0].get("Config"), found[0].get("Layers")
    if not isinstance(config, str) or not isinstance(layers, list):
        raise invalid(f"{what} names no config or no layers")
    return files.read(config), [str(one) for one in layers]


def _same(tag: str, wanted: str) -> bool:
    return wanted in (tag, tag.removesuffix(":latest"), tag.rpartition(":")[2])


def folder_as_layer(folder: Path, file: IO[bytes]) -> None:
    """Write a folder as an archive that depends only on its content, modes and times.

    What belongs to this user belongs to root in it.
    """
    if not folder.is_dir():
        raise ContainerError("image_missing", f"there is no folder {folder}")
    own = (os.geteuid(), os.getegid())

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if (member.uid, member.gid) == own:
            member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        archive.add(folder, ".", filter=as_root)


@contextlib.contextmanager
def temporary(folder: Path) -> Iterator[Any]:
    """Yield a file without a name in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        yield file


def _bounded(file: IO[bytes], what: str) -> bytes:
    content = file.read(format_of.MOST_JSON_BYTES + 1)
    if len(content) > format_of.MOST_JSON_BYTES:
        raise invalid(f"{what} has more than {format_of.MOST_JSON_BYTES:,} bytes")
    return content

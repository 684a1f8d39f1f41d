"""The local store of images: each is found, verified and unpacked once, and then shared.

    blobs/sha256/HEX   what came from registries, by digest
    roots/KEY/         an unpacked image: `KEY` stands for its layers and for whose its files are
    locks/KEY          held by the process that unpacks

A root appears under its name by one rename, when it is complete; a half-written one is never used
and is removed by the next process that unpacks the same. Several processes may share a store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import importlib
import json
import os
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import httpx

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images import disk
from composer_mesh.plugins.harbor.images import manifest as format_of
from composer_mesh.plugins.harbor.images.layers import MOST_BYTES, MOST_ENTRIES, LeftOut, Root
from composer_mesh.plugins.harbor.images.manifest import Descriptor, ImageConfig, invalid
from composer_mesh.plugins.harbor.images.reference import (
    DiskReference,
    RegistryReference,
    parsed,
)
from composer_mesh.plugins.harbor.images.registry import ImageRegistry, stored_credentials
from composer_mesh.plugins.harbor.images.trees import remove_tree

IDS = 65_536
"""User ids and group ids of an image that are kept; higher ones become NOBODY."""
NOBODY = 65_534
CHUNK = 1 << 20
LOCK_POLL_S = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT)
OF_IMAGE = (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.EEXIST)
PLAIN = ImageConfig({}, "/", "")
ZSTD = ("compression.zstd", "backports.zstd")
MOUNT_POINTS = ("proc", "dev")
OpenLayer = Callable[[], contextlib.AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True)
class UnpackedImage:
    """An image that containers start from; `identity` is a digest that names its content."""

    root: Path
    config: ImageConfig
    identity: str


@dataclass(frozen=True)
class Layer:
    """A layer: how to open it, and the digests of its bytes, as they are and uncompressed.

    The first is "" where it is unknown.
    """

    open: OpenLayer
    digest: str
    diff_id: str


class ImageStore:
    """Finds, verifies and unpacks images; its methods block, and threads may call them.

    `first_id` is this machine's id for an image's root where this process may change owners.
    """

    def __init__(
        self,
        folder: Path,
        first_id: int | None = None,
        most_entries: int = MOST_ENTRIES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.folder, self._first_id = folder, first_id
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._known: dict[str, UnpackedImage] = {}
        self.left_out: dict[str, LeftOut] = {}
        """What was not unpacked, by the names of roots that this process made."""
        made_private(folder, 0o711)
        for name in ("blobs", "locks"):
            made_private(folder / name, 0o700)
        made_private(folder / "roots", 0o700, first_id)  # other users of the machine reach none

    def unpacked(self, reference: str, until: float) -> UnpackedImage:
        """Return an image, found once in this process; raises ContainerError.

        `until` is the last moment, by the monotonic clock.
        """
        if (found := self._known.get(reference)) is None:
            with errors_named(f"image {reference}"):
                found = self._find(parsed(reference), until)
            self._known[reference] = found
        return found

    def _find(self, reference: DiskReference | RegistryReference, until: float) -> UnpackedImage:
        if isinstance(reference, RegistryReference):
            return self._pulled(reference, until)
        if reference.kind == "rootfs":
            return self._folder(reference, until)
        if reference.kind == "oci":
            layout = disk.Layout(reference, disk.FolderFiles(reference.path))
            return self._described(layout.find(), layout.read, layout.open, until)
        with contextlib.closing(disk.ArchiveFiles(reference.path)) as files:
            if reference.kind == "docker-archive":
                return self._docker_archive(reference, files, until)
            layout = disk.Layout(reference, files)
            return self._described(layout.find(), layout.read, layout.open, until)

    def _described(
        self,
        found: Descriptor,
        read: Callable[[Descriptor], bytes],
        opened: disk.Opener,
        until: float,
    ) -> UnpackedImage:
        """Return the image of a manifest, or that of an index for this machine."""
        content = _verified(read, found)
        document = format_of.loaded(content, f"manifest {found.digest}")
        if format_of.is_index(document, found.media_type):
            found = format_of.chosen(document, f"index {found.digest}")
            content = _verified(read, found)
        manifest = format_of.manifest(content, f"manifest {found.digest}")
        config_bytes = _verified(read, manifest.config)
        config, diff_ids = format_of.config(config_bytes, f"config {manifest.config.digest}")
        if len(diff_ids) != len(manifest.layers):
            raise invalid(f"{found.digest} has {len(manifest.layers)} layers, its config another")
        layers = [
            Layer(lambda one=one: opened(one), one.digest, diff_id)  # type: ignore[misc]
            for one, diff_id in zip(manifest.layers, diff_ids, strict=True)
        ]
        return UnpackedImage(self._root_of(layers, until), config, found.digest)

    def _docker_archive(
        self, reference: DiskReference, files: disk.ArchiveFiles, until: float
    ) -> UnpackedImage:
        content, names = disk.docker_archive(reference, files)
        config, diff_ids = format_of.config(content, f"the config in {reference.path}")
        if len(diff_ids) != len(names):
            raise invalid(f"{reference.path} has {len(names)} layers, its config {len(diff_ids)}")
        layers = [
            Layer(lambda name=name: files.open(name), "", diff_id)  # type: ignore[misc]
            for name, diff_id in zip(names, diff_ids, strict=True)
        ]
        identity = f"sha256:{hashlib.sha256(content).hexdigest()}"
        return UnpackedImage(self._root_of(layers, until), config, identity)

    def _folder(self, reference: DiskReference, until: float) -> UnpackedImage:
        with disk.temporary(self.folder) as file:
            disk.folder_as_layer(reference.path, file)
            file.seek(0)
            identity = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

            @contextlib.contextmanager
            def opened() -> Iterator[IO[bytes]]:
                file.seek(0)
                yield file

            root = self._root_of([Layer(opened, "", identity)], until)
        return UnpackedImage(root, PLAIN, identity)

    def _pulled(self, reference: RegistryReference, until: float) -> UnpackedImage:
        credentials = stored_credentials(reference.registry)
        with httpx.Client(follow_redirects=False) as client:
            registry = ImageRegistry(reference, until, client, credentials)
            first, content = _first_manifest(registry)

            def opened(wanted: Descriptor) -> contextlib.AbstractContextManager[IO[bytes]]:
                return self._blob(registry, wanted).open("rb")

            def read(wanted: Descriptor) -> bytes:
                if wanted == first:
                    return content
                if wanted.media_type in (*format_of.INDEXES, *format_of.MANIFESTS):
                    return registry.manifest_tried(wanted.digest)[0]
                if wanted.size > format_of.MOST_JSON_BYTES:
                    raise invalid(f"the config {wanted.digest} has {wanted.size:,} bytes")
                return self._blob(registry, wanted).read_bytes()

            return self._described(first, read, opened, until)

    def _blob(self, registry: ImageRegistry, wanted: Descriptor) -> Path:
        """Return the file of a registry's blob, pulled and verified if it is not here yet."""
        algorithm, _, name = wanted.digest.partition(":")
        folder = self.folder / "blobs" / algorithm
        folder.mkdir(mode=0o700, exist_ok=True)
        if (place := folder / name).exists():
            return place
        draft = folder / f".partial-{name}-{secrets.token_hex(8)}"

        def write(pieces: Iterator[bytes]) -> None:
            content = hashlib.new(algorithm)
            with draft.open("wb") as file:
                for piece in pieces:
                    content.update(piece)
                    file.write(piece)
            if (size := draft.stat().st_size) != wanted.size:
                raise httpx.ReadError(f"{size:,} bytes of {wanted.size:,} arrived")
            if content.hexdigest() != name:
                raise ContainerError(
                    "image_digest", f"a blob has digest {content.hexdigest()}, not {wanted.digest}"
                )

        try:
            registry.pull(wanted.digest, wanted.size, write)
            draft.rename(place)
        finally:
            draft.unlink(missing_ok=True)
        return place

    def _root_of(self, layers: Sequence[Layer], until: float) -> Path:
        """Return the folder of unpacked layers, made if it is not here yet."""
        stands_for = [[one.diff_id for one in layers], self._first_id]
        key = hashlib.sha256(json.dumps(stands_for).encode()).hexdigest()
        place = self.folder / "roots" / key
        if not place.exists():
            with self.locked(key, until):
                if not place.exists():
                    self._unpack(layers, place, until)
        return place / "root"

    def _unpack(self, layers: Sequence[Layer], place: Path, until: float) -> None:
        for left in place.parent.glob(f".partial-{place.name}-*"):
            remove_tree(left)
        draft = place.with_name(f".partial-{place.name}-{secrets.token_hex(8)}")
        (draft / "root").mkdir(parents=True)
        (draft / "root").chmod(0o755)  # whatever the umask is: any user of the image reads it
        self._owned(draft, draft / "root")
        try:
            with contextlib.closing(
                Root(draft / "root", self._owner, self._most_entries, self._most_bytes)
            ) as root:
                for layer in layers:
                    _apply(layer, root, self._most_bytes, until)
            self._make_mount_points(draft / "root")
            draft.rename(place)
            if root.left_out != LeftOut():
                self.left_out[place.name] = root.left_out
        except BaseException:
            remove_tree(draft)
            raise

    def _make_mount_points(self, root: Path) -> None:
        for name in MOUNT_POINTS:
            with contextlib.suppress(FileExistsError):
                (root / name).mkdir(mode=0o755)
                self._owned(root / name)
            if not stat.S_ISDIR((root / name).lstat().st_mode):
                raise invalid(f"its /{name} is no folder, so that nothing can be mounted there")

    def _owned(self, *places: Path) -> None:
        for place in places:
            if self._first_id is not None:
                os.chown(place, self._first_id, self._first_id)

    @property
    def _owner(self) -> Callable[[int, int], tuple[int, int]] | None:
        first = self._first_id
        if first is None:
            return None
        return lambda uid, gid: (first + _kept(uid), first + _kept(gid))

    @contextlib.contextmanager
    def locked(self, key: str, until: float) -> Iterator[None]:
        """Hold a name that one process of this machine can hold at a time. Waits for it."""
        with (self.folder / "locks" / key).open("wb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise ContainerError(
                            "start", "another process unpacks the image, and was too slow"
                        ) from None
                    threading.Event().wait(LOCK_POLL_S)
            yield


def _first_manifest(registry: ImageRegistry) -> tuple[Descriptor, bytes]:
    reference = registry.reference
    content, media_type = registry.manifest_tried(reference.digest or reference.tag)
    digest = reference.digest or f"sha256:{hashlib.sha256(content).hexdigest()}"
    return Descriptor(media_type, digest, len(content)), content


def _kept(number: int) -> int:
    return number if 0 <= number < IDS else NOBODY


def _verified(read: Callable[[Descriptor], bytes], wanted: Descriptor) -> bytes:
    content = read(wanted)
    format_of.check_digest(content, wanted.digest, "a manifest or a config")
    return content


class _Hashed:
    """Reads a stream, and knows the digest of what has been read; bytes are bounded."""

    def __init__(self, source: IO[bytes], algorithm: str, most: int, until: float) -> None:
        self._source, self._hash, self._left, self._until = (
            *(source, hashlib.new(algorithm)),
            *(most, until),
        )

    def read(self, size: int = -1) -> bytes:
        """Read at most so many bytes; raises ContainerError beyond the bound."""
        piece = self._source.read(CHUNK if size < 0 else min(size, CHUNK))
        self._hash.update(piece)
        self._left -= len(piece)
        if self._left < 0:
            raise invalid("an image has more bytes than the store unpacks")
        if time.monotonic() >= self._until:
            raise ContainerError("start", "the image was not unpacked in time")
        return piece

    def check(self, digest: str, what: str) -> None:
        """Read the rest; raise ContainerError where the digest is another one."""
        while self.read(CHUNK):
            pass
        if digest and self._hash.hexdigest() != digest.partition(":")[2]:
            raise ContainerError(
                "image_digest", f"{what} has digest {self._hash.hexdigest()}, not {digest}"
            )


def _apply(layer: Layer, root: Root, most_bytes: int, until: float) -> None:
    """Apply a layer and verify both of its digests."""
    with layer.open() as file:
        packed = _Hashed(file, layer.digest.partition(":")[0] or "sha256", most_bytes, until)
        tar = _Hashed(_decompressed(packed), layer.diff_id.partition(":")[0], most_bytes * 2, until)
        try:
            root.apply(tar)  # type: ignore[arg-type]
            tar.check(layer.diff_id, "an unpacked layer")
        finally:  # a damaged layer is one that breaks its format, too
            packed.check(layer.digest, "a layer")


class _Peeked:
    """A stream whose first bytes have been looked at."""

    def __init__(self, first: bytes, source: _Hashed) -> None:
        self._first, self._source = first, source

    def read(self, size: int = -1) -> bytes:
        """Read at most so many bytes."""
        if self._first:
            taken = self._first if size < 0 else self._first[:size]
            self._first = self._first[len(taken) :]
            return taken
        return self._source.read(size)


def _decompressed(packed: _Hashed) -> Any:
    """Return the uncompressed stream of a layer, whatever its media type says."""
    first = packed.read(4)
    source = _Peeked(first, packed)
    if first[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=cast("Any", source), mode="rb")
    if first == b"\x28\xb5\x2f\xfd":
        return _zstd().ZstdFile(source)
    return source


def _zstd() -> Any:
    for name in ZSTD:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ContainerError(
        "unsupported",
        "a layer is compressed by zstd, which Python reads from 3.14 on: pip install "
        "backports.zstd, or use an image with gzip layers",
    )


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Turn errors of files and archives into ContainerError, with the right kind."""
    try:
        yield
    except ContainerError as error:
        detail = error.detail if error.detail.startswith(what) else f"{what}: {error.detail}"
        raise ContainerError(error.kind, detail) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise invalid(f"{what}: a layer is damaged: {error}") from None
    except OSError as error:
        kind = "image_invalid" if error.errno in OF_IMAGE else "backend"
        if error.errno in FULL:
            kind = "disk_full"
        raise ContainerError(kind, f"{what}: {error}") from None  # type: ignore[arg-type]


def made_private(folder: Path, mode: int, owner: int | None = None) -> None:
    """Make a folder that nobody but this user, and `owner`, can write to.

    Raises ContainerError where others can.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), owner) or found.st_mode & 0o022:
        raise ContainerError(
            "backend",
            f"the folder {folder} belongs to user {found.st_uid} or can be written by others: "
            "choose another one by the option cache",
        )
    folder.chmod(mode)
    if owner is not None:
        os.chown(folder, owner, -1)

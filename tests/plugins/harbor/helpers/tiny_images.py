"""Small images made of this machine's own programs: a folder, layers, layouts and archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("sh", "cat", "chmod", "cp", "env", "head", "id", "ln", "ls", "mkdir", "rm", "sleep")
LIBRARY = re.compile(r"(/\S+) \(0x")
PASSWD = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n"
GROUP = "root:x:0:\nagent:x:1000:\nteam:x:50:agent\n"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def tiny_root(folder: Path, programs: Sequence[str] = PROGRAMS) -> Path:
    """Fill a new folder with some programs and their libraries, for `rootfs:`; about 3 MB."""
    for name in ("bin", "etc", "tmp", "root", "home/agent"):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    (folder / "etc/passwd").write_text(PASSWD)
    (folder / "etc/group").write_text(GROUP)
    found = []
    for name in programs:
        source = shutil.which(name)
        assert source is not None, f"this machine has no program {name}"
        shutil.copyfile(Path(source).resolve(), folder / "bin" / name)
        (folder / "bin" / name).chmod(0o755)
        found.append(str(Path(source).resolve()))
    said = subprocess.run(["ldd", *found], check=False, capture_output=True, text=True).stdout
    for path in sorted(set(LIBRARY.findall(said))):
        place = folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(path).resolve(), place)
        place.chmod(0o755)
    return folder


def layer(*entries: tuple[str, Any] | tarfile.TarInfo) -> bytes:
    """Return an uncompressed layer: pairs of a path and bytes, None for a folder, or members."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
                continue
            name, content = entry
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def member(name: str, kind: bytes, link: str = "", **more: Any) -> tarfile.TarInfo:
    """Return a member without content: a link, a device."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    for key, value in more.items():
        setattr(made, key, value)
    return made


def folder_layer(folder: Path) -> bytes:
    """Return a folder as a layer of root's files."""

    def as_root(found: tarfile.TarInfo) -> tarfile.TarInfo:
        found.uid = found.gid = found.mtime = 0
        found.uname = found.gname = ""
        return found

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(folder, ".", filter=as_root)
    return file.getvalue()


def digest_of(content: bytes) -> str:
    """Return the sha256 digest of bytes."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Blobs:
    """An image's blobs by digest, and its manifest."""

    def __init__(
        self,
        layers: Sequence[bytes],
        config: dict[str, Any] | None = None,
        packed: Callable[[bytes], bytes] = lambda one: gzip.compress(one, mtime=0),
        **more: Any,
    ) -> None:
        self.blobs: dict[str, bytes] = {}
        self.diff_ids = [digest_of(one) for one in layers]
        self.config = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": self.diff_ids},
            "config": config or {},
            **more,
        }
        self.manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.add(json.dumps(self.config).encode(), CONFIG),
            "layers": [self.add(packed(one), LAYER) for one in layers],
        }
        self.described = self.add(json.dumps(self.manifest).encode(), MANIFEST)

    def add(self, content: bytes, media_type: str) -> dict[str, Any]:
        """Add a blob; return its descriptor."""
        self.blobs[digest_of(content)] = content
        return {"mediaType": media_type, "digest": digest_of(content), "size": len(content)}

    def layout(self, folder: Path, name: str = "v1", *others: dict[str, Any]) -> Path:
        """Write an image layout."""
        for digest, content in self.blobs.items():
            place = folder / "blobs" / digest.replace(":", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        named = {"annotations": {"org.opencontainers.image.ref.name": name}}
        index = {"schemaVersion": 2, "manifests": [{**self.described, **named}, *others]}
        (folder / "index.json").write_text(json.dumps(index))
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return folder


def docker_archive(file: Path, layers: Sequence[bytes], tag: str = "tiny:v1") -> Path:
    """Write what `docker save` writes."""
    made = Blobs(layers)
    config = json.dumps(made.config).encode()
    names = [f"{place}/layer.tar" for place in range(len(layers))]
    entry = {"Config": "config.json", "RepoTags": [tag], "Layers": names}
    pairs = list(zip(names, layers, strict=True))
    content = [("manifest.json", json.dumps([entry]).encode()), ("config.json", config)]
    file.write_bytes(layer(*content, *pairs))
    return file


def archive_of(folder: Path, file: Path) -> Path:
    """Write a layout as an archive."""
    with tarfile.open(file, "w") as archive:
        archive.add(folder, ".")
    return file

"""References to images: names of registries, and layouts, archives and folders on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from composer_mesh.plugins.harbor.containers.port import ContainerError

ON_DISK = ("oci", "oci-archive", "docker-archive", "rootfs")
DEFAULT_REGISTRY = "docker.io"
HOSTS = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}
"""Names of registries whose server has another name."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
NAME = re.compile(
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
)
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
HOST = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")
EXAMPLE = "write one such as docker.io/library/python:3.11, oci:DIR:NAME or docker-archive:FILE"


@dataclass(frozen=True)
class DiskReference:
    """An image on this machine; `name` picks one of several, "" the only one."""

    kind: Literal["oci", "oci-archive", "docker-archive", "rootfs"]
    path: Path
    name: str = ""


@dataclass(frozen=True)
class RegistryReference:
    """An image of a registry, by tag or by the digest of its manifest."""

    registry: str
    repository: str
    tag: str
    digest: str

    @property
    def base_url(self) -> str:
        """URL of the registry's API: https, but on this machine itself."""
        host = HOSTS.get(self.registry, self.registry)
        return f"{'http' if is_loopback(host) else 'https'}://{host}/v2"

    def __str__(self) -> str:
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{self.registry}/{self.repository}{end}"


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    return re.sub(r":\d+$", "", host) in LOOPBACK


def parsed(reference: str) -> DiskReference | RegistryReference:
    """Return what a reference names; raises ContainerError with the kind "image_missing"."""
    kind, sign, rest = reference.partition(":")
    if sign and kind in ON_DISK:
        return _on_disk(kind, rest, reference)
    return _of_registry(reference)


def _on_disk(kind: str, rest: str, reference: str) -> DiskReference:
    if kind == "rootfs":
        path, name = rest, ""
    else:
        path, _, name = rest.partition(":")
    if not path:
        raise ContainerError("image_missing", f"{reference!r} names no path: {EXAMPLE}")
    return DiskReference(kind, Path(path), name)  # type: ignore[arg-type]


def _of_registry(reference: str) -> RegistryReference:
    rest, at, digest = reference.partition("@")
    host, slash, path = rest.partition("/")
    if not slash or not (set(host) & set(".:") or host == "localhost"):
        host, path = DEFAULT_REGISTRY, rest
    name, _, tag = path.partition(":")
    if host == DEFAULT_REGISTRY and "/" not in name:
        name = f"library/{name}"
    if (
        not HOST.fullmatch(host)
        or not NAME.fullmatch(name)
        or (at and not DIGEST.fullmatch(digest))
        or not TAG.fullmatch(tag or "latest")
    ):
        raise ContainerError("image_missing", f"{reference[:300]!r} names no image: {EXAMPLE}")
    return RegistryReference(host, name, "" if digest else tag or "latest", digest)

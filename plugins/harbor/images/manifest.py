"""Manifests, indexes and configs of OCI images and of Docker's twins of them, checked.

All of it is a stranger's: types, sizes and digests are checked before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images.reference import DIGEST

MOST_JSON_BYTES = 8 << 20
MOST_LAYERS = 500
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}
VARIANTS = {"arm64": ("", "v8")}


@dataclass(frozen=True)
class Descriptor:
    """A blob: its media type, digest and size in bytes."""

    media_type: str
    digest: str
    size: int


@dataclass(frozen=True)
class ImageConfig:
    """What an image says of its containers; only services run its entry point and command."""

    environment: Mapping[str, str]
    workdir: str
    user: str
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()


@dataclass(frozen=True)
class ImageManifest:
    """The config and the layers of an image, bottom first."""

    config: Descriptor
    layers: Sequence[Descriptor]


def invalid(detail: str) -> ContainerError:
    """Return the error for an image that breaks its format."""
    return ContainerError("image_invalid", detail)


def loaded(content: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object; raises ContainerError."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid(f"{what} is no JSON object, but {type(found).__name__}")
    return found


def check_digest(content: bytes, digest: str, what: str) -> None:
    """Raise ContainerError where bytes are not what a digest says."""
    found = hashlib.new(digest.partition(":")[0], content).hexdigest()
    if found != digest.partition(":")[2]:
        raise ContainerError("image_digest", f"{what} has digest {found}, not {digest}")


def descriptor(found: object, what: str) -> Descriptor:
    """Return a descriptor; raises ContainerError."""
    if not isinstance(found, dict):
        raise invalid(f"{what} is no descriptor")
    digest, size = found.get("digest"), found.get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise invalid(f"{what} has the digest {str(digest)[:200]!r}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise invalid(f"{what} has the size {size!r}")
    return Descriptor(str(found.get("mediaType", "")), digest, size)


def is_index(found: Mapping[str, Any], media_type: str) -> bool:
    """Whether a document lists manifests of several platforms."""
    return (media_type or found.get("mediaType")) in INDEXES or "manifests" in found


def manifest(content: bytes, what: str) -> ImageManifest:
    """Return an image's manifest; raises ContainerError."""
    found = loaded(content, what)
    layers = found.get("layers")
    if found.get("schemaVersion") != 2 or not isinstance(layers, list):
        raise invalid(f"{what} is no image manifest of schema 2")
    if len(layers) > MOST_LAYERS:
        raise invalid(f"{what} has {len(layers)} layers, more than {MOST_LAYERS}")
    return ImageManifest(
        descriptor(found.get("config"), f"the config of {what}"),
        [descriptor(one, f"layer {place} of {what}") for place, one in enumerate(layers)],
    )


def chosen(found: Mapping[str, Any], what: str) -> Descriptor:
    """Return the manifest of an index that is for this machine; raises ContainerError."""
    entries = found.get("manifests")
    if not isinstance(entries, list):
        raise invalid(f"{what} lists no manifests")
    machine = MACHINES.get(platform.machine(), platform.machine())
    offered = []
    for entry in entries:
        place = entry.get("platform") if isinstance(entry, dict) else None
        place = place if isinstance(place, dict) else {}
        variant = place.get("variant", "")
        offered.append(f"{place.get('os')}/{place.get('architecture')}{variant and '/'}{variant}")
        if (place.get("os"), place.get("architecture")) == ("linux", machine) and (
            variant in VARIANTS.get(machine, ("",))
        ):
            return descriptor(entry, what)
    raise ContainerError(
        "image_missing", f"{what} has nothing for linux/{machine}, only {', '.join(offered)[:500]}"
    )


def config(content: bytes, what: str) -> tuple[ImageConfig, list[str]]:
    """Return what an image's config says, and the digests of its uncompressed layers."""
    found = loaded(content, what)
    machine = MACHINES.get(platform.machine(), platform.machine())
    if found.get("architecture", machine) != machine or found.get("os", "linux") != "linux":
        raise ContainerError(
            "image_missing",
            f"{what} is for {found.get('os')}/{found.get('architecture')}, and this machine is "
            f"linux/{machine}",
        )
    root = found.get("rootfs")
    digests = root.get("diff_ids") if isinstance(root, dict) else None
    if not isinstance(digests, list) or not all(
        isinstance(one, str) and DIGEST.fullmatch(one) for one in digests
    ):
        raise invalid(f"{what} has no digests of layers")
    own = found.get("config") or {}
    if not isinstance(own, dict):
        raise invalid(f"{what} has a config that is no object")
    variables, entrypoint, command = (
        _texts(own.get(key) or [], f"{what}: {key}") for key in ("Env", "Entrypoint", "Cmd")
    )
    pairs = [one.partition("=") for one in variables]
    return (
        ImageConfig(
            {name: value for name, sign, value in pairs if sign and name},
            str(own.get("WorkingDir") or "/"),
            str(own.get("User") or ""),
            entrypoint,
            command,
        ),
        digests,
    )


def _texts(found: object, what: str) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise invalid(f"{what} is no list of texts")
    return found

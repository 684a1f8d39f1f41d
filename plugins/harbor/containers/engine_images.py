"""Images of a daemon: pulled, loaded from disk or built, whatever an image's source is."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from composer_mesh.plugins.harbor.containers.engine_api import EngineApi, packed
from composer_mesh.plugins.harbor.containers.port import ContainerError, ImageSource
from composer_mesh.plugins.harbor.images.disk import folder_as_layer
from composer_mesh.plugins.harbor.images.reference import DiskReference, parsed
from composer_mesh.plugins.harbor.images.store import errors_named

LABEL = "composer-mesh"
LOADED = re.compile(r"Loaded image(?: ID)?(?:\(s\))?: ([^\s,]+)")


async def image_name(api: EngineApi, image: ImageSource, within_s: float) -> str:
    """Return a name that the daemon has for an image, after it was made known to it."""
    try:
        async with asyncio.timeout(within_s):
            if image.build is not None:
                return await _built(api, image, image.build)
            found = parsed(image.reference)
            if isinstance(found, DiskReference):
                with errors_named(f"image {image.reference}"):
                    return await _loaded(api, found)
            return await _pulled(api, str(found))
    except TimeoutError:
        kind: Any = "build" if image.build is not None else "registry"
        raise ContainerError(kind, f"{image} took more than {within_s:g} s") from None


async def _pulled(api: EngineApi, name: str) -> str:
    try:
        await api.call("GET", f"/images/{name}/json", "image_missing")
    except ContainerError as error:
        if error.kind != "image_missing":
            raise
        query = {"fromImage": name}
        path = "/images/create"
        await api.progress("POST", path, "image_missing", params=query, timeout_s=None)
    return name


async def _loaded(api: EngineApi, found: DiskReference) -> str:
    """Hand an image on disk to the daemon; return the name that it is given."""
    content = await asyncio.to_thread(_on_disk, found)
    if found.kind == "rootfs":
        name = f"{LABEL}-{hashlib.sha256(content).hexdigest()[:32]}"
        query = {"fromSrc": "-", "repo": name, "tag": "latest"}
        await api.progress("POST", "/images/create", "image_invalid", params=query, content=content)
        return f"{name}:latest"
    said = await api.progress("POST", "/images/load", "image_invalid", content=content)
    loaded = LOADED.search(said)
    if loaded is None:
        raise ContainerError("image_invalid", f"{found.path}: the daemon loaded none: {said!r}")
    return loaded[1]


async def _built(api: EngineApi, image: ImageSource, folder: Path) -> str:
    content = await asyncio.to_thread(_context, folder)
    name = f"{LABEL}-{base64.b32encode(os.urandom(10)).decode().lower()}"
    query = {"t": name, "rm": "true", "forcerm": "true", "dockerfile": image.dockerfile}
    query["buildargs"] = json.dumps(dict(image.arguments))
    headers = {"Content-Type": "application/x-tar"}
    await api.progress(
        "POST",
        "/build",
        "build",
        params=query,
        content=content,
        headers=headers,
        timeout_s=None,
    )
    return name


def _on_disk(found: DiskReference) -> bytes:
    with tempfile.TemporaryFile() as file:
        if found.kind == "rootfs":
            folder_as_layer(found.path, file)
        elif found.kind == "oci":
            with tarfile.open(fileobj=file, mode="w") as archive:
                archive.add(found.path, ".")
        else:
            return found.path.read_bytes()
        file.seek(0)
        content: bytes = file.read()
        return content


def _context(folder: Path) -> bytes:
    files = {
        one.relative_to(folder).as_posix(): one
        for one in sorted(folder.rglob("*"))
        if one.is_file()
    }
    executable = frozenset(path for path, one in files.items() if one.stat().st_mode & 0o100)
    return packed({path: one.read_bytes() for path, one in files.items()}, executable, (0, 0))

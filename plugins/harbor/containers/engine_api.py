"""The HTTP API that Docker and Podman share, over a Unix socket, with errors by kind."""

from __future__ import annotations

import io
import json
import os
import posixpath
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from composer_mesh.plugins.harbor.containers.port import ContainerError, Kind

CONNECT_S = 10.0
CALL_S = 60.0
MOST_ERROR_BYTES = 1 << 16
FULL = ("no space left on device", "disk quota exceeded")


def sockets(name: str) -> list[Path]:
    """Return where a daemon's socket may be: of this user, then of the machine."""
    host = os.environ.get("CONTAINER_HOST" if name == "podman" else "DOCKER_HOST", "")
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    places = [host.removeprefix("unix://")] if host.startswith("unix://") else []
    if name == "podman":
        places += [f"{runtime}/podman/podman.sock", "/run/podman/podman.sock"]
    else:
        places += [f"{runtime}/docker.sock", "/var/run/docker.sock"]
    return [Path(one) for one in places]


class EngineApi:
    """Calls of one daemon. Raises ContainerError with the kind "backend" where it is away."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket)),
            base_url="http://daemon",
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        kind: Kind = "backend",
        timeout_s: float | None = CALL_S,
        **more: Any,
    ) -> AsyncIterator[httpx.Response]:
        """Open an answer; raise ContainerError, of `kind` where the daemon refuses."""
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        try:
            async with self._client.stream(method, path, timeout=timeout, **more) as answer:
                if answer.status_code >= 400:
                    raise await _refused(answer, path, kind)
                yield answer
        except httpx.TimeoutException:
            raise ContainerError(kind, f"{self.socket}: {path} took too long") from None
        except httpx.TransportError as error:
            raise ContainerError(
                "backend", f"{self.socket}: {type(error).__name__}: {error}"
            ) from None

    async def call(
        self, method: str, path: str, kind: Kind = "backend", **more: Any
    ) -> dict[str, Any]:
        """Return a JSON answer, {} for an empty one."""
        async with self.stream(method, path, kind, **more) as answer:
            content = await answer.aread()
        try:
            found = json.loads(content) if content.strip() else {}
        except ValueError:
            raise ContainerError("backend", f"{self.socket}: {path} is no JSON") from None
        return found if isinstance(found, dict) else {"answer": found}

    async def progress(self, method: str, path: str, kind: Kind, **more: Any) -> str:
        """Follow an answer of JSON lines to its end; return its texts, raise for an error in it."""
        said = []
        async with self.stream(method, path, kind, **more) as answer:
            async for line in answer.aiter_lines():
                try:
                    found = json.loads(line) if line.strip() else {}
                except ValueError:
                    continue  # a daemon may answer with plain text here
                if error := found.get("error"):
                    raise ContainerError(kind_of(str(error), kind), f"{path}: {error}")
                said.append(str(found.get("stream") or ""))
        return "".join(said)


def kind_of(text: str, kind: Kind) -> Kind:
    """Return the kind of an error by a daemon's words: a full disk is one wherever it happens."""
    return "disk_full" if any(one in text.lower() for one in FULL) else kind


async def _refused(answer: httpx.Response, path: str, kind: Kind) -> ContainerError:
    content = b""
    async for piece in answer.aiter_bytes():
        content += piece
        if len(content) > MOST_ERROR_BYTES:
            break
    try:
        said = str(json.loads(content).get("message"))
    except (ValueError, AttributeError):
        said = content[:500].decode("utf-8", "replace")
    missing = answer.status_code == 404 and path.startswith("/containers/")
    return ContainerError(
        "container_died" if missing else kind_of(said, kind),
        f"{path}: status {answer.status_code}: {said}",
    )


async def demultiplexed(answer: httpx.Response, most: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the pieces of a command's streams: 1 is standard output, 2 is standard error."""
    buffer = b""
    async for piece in answer.aiter_bytes():
        buffer += piece
        while len(buffer) >= 8:
            size = int.from_bytes(buffer[4:8], "big")
            if size > most:
                raise ContainerError("backend", f"a frame of {size:,} bytes is no output")
            if len(buffer) < 8 + size:
                break
            yield buffer[0], buffer[8 : 8 + size]
            buffer = buffer[8 + size :]


def packed(files: Mapping[str, bytes], executable: frozenset[str], owner: tuple[int, int]) -> bytes:
    """Return files as an archive, with the folders that they lie in."""
    file, folders = io.BytesIO(), set()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, content in sorted(files.items()):
            parts = path.split("/")[:-1]
            for place in range(len(parts)):
                folders.add("/".join(parts[: place + 1]))
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o755 if path in executable else 0o644
            member.uid, member.gid = owner
            archive.addfile(member, io.BytesIO(content))
        for path in sorted(folders):
            member = tarfile.TarInfo(path)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            member.uid, member.gid = owner
            archive.addfile(member)
    return file.getvalue()


def unpacked(content: bytes) -> dict[str, bytes]:
    """Return the regular files of an archive whose paths begin with one folder's name."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            _, _, path = posixpath.normpath(member.name).partition("/")
            source = archive.extractfile(member) if member.isreg() and path else None
            if source is not None:
                found[path] = source.read()
    return found

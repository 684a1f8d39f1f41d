"""Containers of Podman and Docker by their sockets: one implementation for both.

A command that is late, and `stop_processes`, end all processes by a restart of the container: it
needs no program of the image, and nothing survives it. Files are put and read by the daemon.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shlex
import socket
import tarfile
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer_mesh.plugins.harbor.containers.box_changes import MOST_CHANGES
from composer_mesh.plugins.harbor.containers.engine_api import (
    EngineApi,
    demultiplexed,
    packed,
    sockets,
    unpacked,
)
from composer_mesh.plugins.harbor.containers.engine_images import LABEL, image_name
from composer_mesh.plugins.harbor.containers.port import (
    OUTPUT_BYTES,
    Change,
    Container,
    ContainerError,
    ContainerSettings,
    ContainerSnapshot,
    FinishedCommand,
    ImageSource,
    NetworkKind,
    ServiceContainer,
    TooLarge,
    inside,
)
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import MIB, check_path, folders_of

MOST_CONTAINERS = 16
OPEN_FILES = 1024
PAUSE = ["/bin/sh", "-c", "trap : TERM; while :; do sleep 2147483647 & wait $!; done"]
KILLED = 128 + 9
ONLY_BOXES = (
    "Podman and Docker have none here: set backend to 'bubblewrap' in environment.sandbox.options"
)
MOST_FRAME = 64 * MIB
INPUT = "/.composer-mesh-input"
CHANGES: tuple[Change, ...] = ("changed", "added", "removed")
"""The kinds of changes by the daemon's numbers."""
MODE_FOLDER = 1 << 31
"""The bit of a folder in the modes that daemons state."""
MODE_SYMLINK = 1 << 27


@dataclass(frozen=True)
class EngineSnapshot:
    """An image that was made of a container."""

    image: str
    api: EngineApi

    async def remove(self) -> None:
        """Remove the image."""
        await self.api.call("DELETE", f"/images/{self.image}")


class EngineContainers:
    """Starts containers of a daemon, `most` at once."""

    own_loopback = False

    def __init__(
        self,
        name: Literal["podman", "docker"],
        most: int = MOST_CONTAINERS,
        socket: str | Path | None = None,
    ) -> None:
        """Open the socket, or the first that there is; the daemon is not called yet."""
        places = [Path(socket)] if socket else sockets(name)
        found = next((one for one in places if one.is_socket()), None)
        if found is None:
            raise UnusableTask(
                f"{name} has no socket at {' or '.join(map(str, places))}: start its service, or "
                "name the socket by the option socket"
            )
        self.name, self.most, self.api = name, most, EngineApi(found)
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self.version = ""

    async def check(self) -> str:
        """Return the version of the daemon; raises ContainerError."""
        return str((await self.api.call("GET", "/version")).get("Version", ""))

    def describe(self) -> Iterator[str]:
        """Yield lines."""
        yield f"containers: {self.name} {self.version} at {self.api.socket}".replace("  ", " ")
        yield "  storage_bytes bounds each file, not all of them together"

    async def prepare(self, image: ImageSource, *, build_s: float = 600.0) -> str:
        """Pull, load or build an image; return its id."""
        name = await image_name(self.api, image, build_s)
        return str((await self.api.call("GET", f"/images/{name}/json", "image_missing"))["Id"])

    async def start(
        self, settings: ContainerSettings, *, snapshot: ContainerSnapshot | None = None
    ) -> EngineContainer:
        """Start a container, from a snapshot if one is given. Waits for a place."""
        if settings.mounts:
            raise ContainerError("unsupported", f"mounts: {ONLY_BOXES}")
        if snapshot is None:
            image = await image_name(self.api, settings.image, settings.build_s)
        elif isinstance(snapshot, EngineSnapshot):
            image = snapshot.image
        else:
            raise ContainerError("unsupported", "the snapshot is of another back end")
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.most))
        await places.acquire()
        container = EngineContainer(self.api, settings, places)
        try:
            async with asyncio.timeout(settings.start_s):
                await container.open(image)
        except TimeoutError:
            await container.close()
            raise ContainerError(
                "start", f"it was not ready within {settings.start_s:g} s"
            ) from None
        except BaseException:
            await container.close()
            raise
        return container

    async def start_sidecar(
        self,
        settings: ContainerSettings,  # noqa: ARG002
        main: Container,  # noqa: ARG002
    ) -> ServiceContainer:
        """Raise ContainerError: containers of a daemon share no network here."""
        raise ContainerError("unsupported", f"services of a task: {ONLY_BOXES}")

    async def close(self) -> None:
        """Close the connections; containers end with their own `close`."""
        await self.api.close()


class EngineContainer:
    """One container of a daemon. Use `Containers.start`."""

    def __init__(
        self, api: EngineApi, settings: ContainerSettings, place: asyncio.Semaphore
    ) -> None:
        self._api, self._settings, self._place = api, settings, place
        self._id = ""
        self._closed = False

    async def open(self, image: str) -> None:
        """Create the container and start it."""
        own = self._settings
        limits = {"nofile": OPEN_FILES, "nproc": own.processes}
        if own.storage_bytes is not None:
            limits["fsize"] = own.storage_bytes
        body: dict[str, Any] = {
            "Image": image,
            "Entrypoint": PAUSE,
            "Cmd": [],
            "Env": [f"{name}={value}" for name, value in own.environment.items()],
            "Labels": {LABEL: str(os.getpid())},
            "HostConfig": {
                "NetworkMode": own.network,
                "PidsLimit": own.processes,
                "Ulimits": [
                    {"Name": name, "Soft": most, "Hard": most} for name, most in limits.items()
                ],
                **given(
                    Memory=own.memory_bytes,
                    MemorySwap=own.memory_bytes,
                    NanoCpus=None if own.cpus is None else int(own.cpus * 1e9),
                ),
            },
        }
        body |= given(WorkingDir=own.workdir, User=own.user)
        made = await self._api.call("POST", "/containers/create", "start", json=body)
        self._id = str(made["Id"])
        await self._api.call("POST", f"/containers/{self._id}/start", "start")

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        user: str | None = None,
        environment: Mapping[str, str] = {},
        workdir: str | None = None,
        output_bytes: int = OUTPUT_BYTES,
    ) -> FinishedCommand:
        """Run a command. Waits for its end; one that is late ends all processes."""
        if not argv:
            raise ValueError("a command has at least one word")
        words = list(argv)
        if stdin:
            await self.put({INPUT.strip("/"): stdin}, "/")
            words = ["/bin/sh", "-c", f'exec "$@" < {INPUT}', "sh", *words]
        body: dict[str, Any] = {
            "AttachStdout": True,
            "AttachStderr": True,
            "Cmd": words,
            "Env": [f"{name}={value}" for name, value in environment.items()],
        }
        body |= given(User=user, WorkingDir=workdir)
        made = await self._api.call("POST", f"/containers/{self._id}/exec", json=body)
        began, streams = time.monotonic(), _Streams(output_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                await self._follow(str(made["Id"]), streams)
        except TimeoutError:
            await self.stop_processes()
            return streams.finished("wall_time", None, time.monotonic() - began)
        found = await self._api.call("GET", f"/exec/{made['Id']}/json")
        code = found.get("ExitCode")
        seconds = time.monotonic() - began
        if not isinstance(code, int):
            raise ContainerError("container_died", "a command ended without an exit code")
        if code == KILLED and await self._state("OOMKilled"):
            return streams.finished("memory", None, seconds)
        if code >= 128 and not await self._state("Running"):
            raise ContainerError("container_died", f"it ended while {shlex.join(argv)[:200]} ran")
        if code == KILLED:
            return streams.finished("signal", None, seconds)
        return streams.finished("exited", code, seconds)

    async def put(
        self,
        files: Mapping[str, bytes],
        folder: str,
        *,
        executable: Collection[str] = (),
        owner: str = "root",
    ) -> None:
        """Write files below a folder; a link in its place is removed first."""
        for path in files:
            check_path(path)
        inner = inside(folder)
        if inner and is_link(await self._stat(folder)):
            await self.remove(folder)
        ids = await self._ids(owner)
        names = {f"{inner}/{path}".lstrip("/"): content for path, content in files.items()}
        modes = frozenset(f"{inner}/{path}".lstrip("/") for path in executable)
        content = packed(names, modes, ids)
        headers = {"Content-Type": "application/x-tar"}
        query = {"path": "/"}
        path = f"/containers/{self._id}/archive"
        await self._api.call("PUT", path, params=query, content=content, headers=headers)

    async def get(self, folder: str, *, most_bytes: int) -> Mapping[str, bytes]:
        """Return the regular files below a folder; no link is followed."""
        found = await self._stat(folder)
        if not found or is_link(found):
            raise FileNotFoundError(f"the container has no folder {folder}")
        content, path = bytearray(), f"/containers/{self._id}/archive"
        async with self._api.stream("GET", path, params={"path": folder}) as answer:
            async for piece in answer.aiter_bytes():
                content += piece
                if len(content) > 2 * most_bytes + MIB:
                    raise TooLarge(f"{folder} has more than {most_bytes:,} bytes")
        files = await asyncio.to_thread(unpacked, bytes(content))
        if sum(map(len, files.values())) > most_bytes:
            raise TooLarge(f"{folder} has more than {most_bytes:,} bytes")
        return files

    async def remove(self, path: str) -> None:
        """Remove a path by the image's own `rm`, and make sure from outside that it is gone."""
        if not inside(path):
            raise ValueError("the root of a container is not removed: name a path below it")
        await self.run(["/bin/rm", "-rf", "--", path], user="0", workdir="/")
        if await self._stat(path):
            raise ContainerError("backend", f"{path} could not be removed in the container")

    async def listen(self, port: int) -> socket.socket:  # noqa: ARG002
        """Raise ContainerError: a daemon gives no socket of a container's own network."""
        raise ContainerError("unsupported", f"a socket of its own loopback: {ONLY_BOXES}")

    async def connect(self, port: int) -> socket.socket:  # noqa: ARG002
        """Raise ContainerError, for the same reason."""
        raise ContainerError("unsupported", f"a connection to its own loopback: {ONLY_BOXES}")

    async def changes(self) -> Mapping[str, Change]:
        """Return the paths that the daemon finds changed, without folders that were not removed."""
        found = await self._api.call("GET", f"/containers/{self._id}/changes")
        listed = {str(one["Path"]): CHANGES[int(one["Kind"])] for one in found.get("answer") or []}
        if len(listed) > MOST_CHANGES:
            raise ContainerError("backend", f"a container changed over {MOST_CHANGES:,} files")
        above = {folder for path in listed for folder in folders_of(path)}
        kept: dict[str, Change] = {}
        for path, how in listed.items():
            is_file = path not in above and not await self._is_folder(path)
            if how == "removed" or is_file:
                kept[path] = how
        return kept

    async def _is_folder(self, path: str) -> bool:
        return bool(int((await self._stat(path)).get("mode") or 0) & MODE_FOLDER)

    async def stop_processes(self, network: NetworkKind | None = None) -> None:
        """End all processes by a restart."""
        if network not in (None, self._settings.network):
            raise ContainerError("unsupported", f"a change of the network: {ONLY_BOXES}")
        path = f"/containers/{self._id}/restart"
        await self._api.call("POST", path, "container_died", params={"t": "0"})

    async def snapshot(self) -> EngineSnapshot:
        """Make an image of the container's files."""
        query = {"container": self._id, "pause": "true"}
        made = await self._api.call("POST", "/commit", params=query, json={}, timeout_s=None)
        return EngineSnapshot(str(made["Id"]), self._api)

    async def close(self) -> None:
        """Remove the container."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._id:
                query = {"force": "true", "v": "true"}
                await self._api.call("DELETE", f"/containers/{self._id}", params=query)
        except ContainerError as error:
            if error.kind != "container_died":
                raise
        finally:
            self._place.release()

    async def _follow(self, command: str, streams: _Streams) -> None:
        body = {"Detach": False, "Tty": False}
        path = f"/exec/{command}/start"
        async with self._api.stream("POST", path, json=body, timeout_s=None) as answer:
            async for number, piece in demultiplexed(answer, MOST_FRAME):
                streams.take(number, piece)

    async def _state(self, name: str) -> bool:
        found = await self._api.call("GET", f"/containers/{self._id}/json")
        return bool(found.get("State", {}).get(name))

    async def _stat(self, path: str) -> dict[str, Any]:
        """Return what a path is in the container; {} where nothing is there."""
        where = f"/containers/{self._id}/archive"
        try:
            async with self._api.stream("HEAD", where, params={"path": path}) as answer:
                text = answer.headers.get("X-Docker-Container-Path-Stat", "")
        except ContainerError as error:
            if error.kind == "container_died" and await self._state("Running"):
                return {}
            raise
        found: dict[str, Any] = json.loads(base64.b64decode(text)) if text else {}
        return found

    async def _ids(self, owner: str) -> tuple[int, int]:
        """Return a user's ids by the container's /etc/passwd."""
        if owner in ("root", "0"):
            return 0, 0
        path, query = f"/containers/{self._id}/archive", {"path": "/etc/passwd"}
        async with self._api.stream("GET", path, params=query) as answer:
            content = await answer.aread()
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            source = archive.extractfile(archive.next() or tarfile.TarInfo())
            text = b"" if source is None else source.read()
        for line in text.decode("utf-8", "replace").splitlines():
            parts = line.split(":")
            if len(parts) > 3 and owner in (parts[0], parts[2]):
                return int(parts[2]), int(parts[3])
        raise ContainerError("unsupported", f"the container has no user {owner!r}")


def is_link(found: Mapping[str, Any]) -> bool:
    """Whether a daemon says of a path that it is a link, by the bits of a mode in Go."""
    return bool(int(found.get("mode", 0)) & MODE_SYMLINK)


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are set."""
    return {name: value for name, value in values.items() if value is not None}


class _Streams:
    """Standard output and error of a command, kept up to a bound."""

    def __init__(self, most: int) -> None:
        self._most, self._cut = most, False
        self._kept = {1: bytearray(), 2: bytearray()}

    def take(self, number: int, piece: bytes) -> None:
        kept = self._kept.setdefault(number, bytearray())
        left = self._most - len(kept)
        kept += piece[:left]
        self._cut = self._cut or len(piece) > left

    def finished(self, ended: Any, code: int | None, seconds: float) -> FinishedCommand:
        output, errors = bytes(self._kept[1]), bytes(self._kept[2])
        return FinishedCommand(code, ended, output, errors, self._cut, seconds)

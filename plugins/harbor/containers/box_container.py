"""One container in a box: its layer, its commands, its files and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import math
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.mesh.sandboxes.box_process import ControlGroups
from composer_mesh.plugins.harbor.containers.box_changes import copy_changes, layer_changes
from composer_mesh.plugins.harbor.containers.box_exec import KILL
from composer_mesh.plugins.harbor.containers.box_streams import Outputs
from composer_mesh.plugins.harbor.containers.port import (
    OUTPUT_BYTES,
    Change,
    ContainerError,
    ContainerSettings,
    FinishedCommand,
    NetworkKind,
    TooLarge,
    inside,
)
from composer_mesh.plugins.harbor.images.manifest import ImageConfig
from composer_mesh.plugins.harbor.images.store import FULL, ImageStore, errors_named
from composer_mesh.plugins.harbor.images.trees import remove_tree
from composer_mesh.tasks.sandbox import check_path

FREE_BYTES = 16 << 20
"""Free bytes of the disk below which the results of commands are not trusted."""
OPEN_FILES = 65_536
UNBOUNDED_BYTES = 1 << 62
END_S = 30.0
LONGEST_REPORT = 1 << 16
NO_MEMORY = 12
KILLED = 128 + 9
SERVICE_BYTES = 1 << 16
"""Kept of what a service writes; the rest is read and dropped."""
LOOPBACK = "127.0.0.1"
HOSTS = b"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 box\n"
DIED = "its first process, or the one that holds it, was killed"


class BoxOwner(Protocol):
    """What a container needs of the back end that made it."""

    store: ImageStore
    layers: Path
    overlays: bool
    first_id: int | None
    groups: ControlGroups | None

    async def started(
        self,
        settings: ContainerSettings,
        lowers: tuple[Path, ...],
        config: ImageConfig,
        place: asyncio.Semaphore | None,
        network_of: str | None = None,
    ) -> BoxContainer:
        """Start a container on some folders, the lowest first; in the network of another one."""

    async def ask(
        self, request: Mapping[str, Any], descriptors: Sequence[int] = ()
    ) -> socket.socket:
        """Send the keeper a request; return the socket that it answers on."""

    async def copy(self, source: Path, target: Path) -> None:
        """Copy a folder of files of containers to a new one."""

    def hold(self, folders: Sequence[Path]) -> None:
        """Keep copies of containers' files until a release."""

    async def release(self, folders: Sequence[Path]) -> None:
        """Remove those copies that nobody else holds."""


@dataclass(frozen=True)
class BoxSnapshot:
    """Files of a container: its image's folders, and a copy of what it changed."""

    lowers: tuple[Path, ...]
    config: ImageConfig
    own: Path
    owner: BoxOwner = field(repr=False, compare=False)

    async def remove(self) -> None:
        """Remove the copy, once no container and no other snapshot needs it."""
        await self.owner.release((*self.lowers, self.own))


class BoxContainer:
    """One container. Use `Containers.start`."""

    def __init__(
        self,
        owner: BoxOwner,
        settings: ContainerSettings,
        lowers: tuple[Path, ...],
        config: ImageConfig,
        own: Path,
        place: asyncio.Semaphore | None,
        network_of: str | None,
    ) -> None:
        self._owner, self._settings, self._place = owner, settings, place
        self._network_of = network_of
        self.lowers, self.config, self.own = lowers, config, own
        self._status: socket.socket | None = None
        self._outputs = Outputs()
        self._user = settings.user or config.user or "root"
        self._workdir = settings.workdir or config.workdir

    async def open(self) -> None:
        """Make the layer, start the box and give it what images lack. Waits until it is ready."""
        self._owner.hold(self.lowers)
        with errors_named("the layer of a container"):
            for name in ("", "upper", "work"):
                make_folder(self.own / name, self._owner.first_id)
        if not self._owner.overlays:
            remove_tree(self.own / "upper")
            await self._owner.copy(self.lowers[-1], self.own / "upper")
        limits = self._settings
        request = {
            "do": "start",
            "name": self.own.name,
            "lowers": [str(one) for one in self.lowers] if self._owner.overlays else [],
            "upper": str(self.own / "upper"),
            "work": str(self.own / "work"),
            "host_network": limits.network == "host",
            "network_of": self._network_of,
            "mounts": [[str(host), path] for path, host in limits.mounts.items()],
            "memory_bytes": limits.memory_bytes or UNBOUNDED_BYTES,
            "processes": limits.processes,
        }
        self._status = await self._owner.ask(request)
        report = checked(await report_of(self._status), "start")
        if "ended" in report:
            raise ContainerError("start", f"the box ended: {report['error'] or report['ended']}")
        found = await self._on_files(
            "prepare",
            folders=[self._workdir],
            files=host_files(limits),
            user=self._user,
            owner="0",
            executable=(),
        )
        if found["uid"] and self._owner.first_id is None:
            raise ContainerError(
                "unsupported",
                f"the image's user is {self._user!r}, and containers of an unprivileged user have "
                "no user but root: run as root, use podman, or set the user to root",
            )

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
        """Run a command. Waits for its end."""
        variables = {**self.config.environment, **self._settings.environment, **environment}
        job = {
            "argv": [encoded(one) for one in argv],
            "environment": {encoded(name): encoded(value) for name, value in variables.items()},
            "user": user or self._user,
            "workdir": encoded(workdir or self._workdir),
            "limits": self._limits(),
        }
        if not argv:
            raise ValueError("a command has at least one word")
        began = time.monotonic()
        with contextlib.ExitStack() as opened:
            given = opened.enter_context(memory_file("job", marshal.dumps(job)))
            source = opened.enter_context(memory_file("stdin", stdin))
            output = self._outputs.opened(output_bytes)
            errors = self._outputs.opened(output_bytes)
            try:
                streams = [given, source, output.its_own, errors.its_own]
                status = opened.enter_context(await self._ask({"do": "exec"}, streams))
            finally:
                output.given_away()
                errors.given_away()
            report, late = await _ended_within(status, timeout_s)
            report = self._alive(report)
            kept = output.finish(), errors.finish()
        self._check_disk()
        ended, code = how_ended(report, late)
        if ended == "memory" and self._settings.memory_bytes is None:
            raise ContainerError("host_memory", "the kernel killed a command that had no bound")
        cut = output.cut or errors.cut
        return FinishedCommand(code, ended, *kept, cut, time.monotonic() - began)  # type: ignore[arg-type]

    async def serve(
        self, entrypoint: Sequence[str] | None, command: Sequence[str] | None
    ) -> FinishedCommand:
        """Run the image's own program, or another one. Waits for its end."""
        first = self.config.entrypoint if entrypoint is None else entrypoint
        inherited = self.config.command if entrypoint is None else ()
        words = [*first, *(inherited if command is None else command)]
        if not words:
            raise ContainerError("start", "neither the image nor its service states a command")
        return await self.run(words, timeout_s=math.inf, output_bytes=SERVICE_BYTES)

    async def put(
        self,
        files: Mapping[str, bytes],
        folder: str,
        *,
        executable: Collection[str] = (),
        owner: str = "root",
    ) -> None:
        """Write files below a folder; no link is followed."""
        for path in files:
            check_path(path)
        await self._on_files(
            "put",
            folder=inside(folder),
            files={path: bytes(content) for path, content in files.items()},
            executable=sorted(executable),
            owner=owner,
        )

    async def get(self, folder: str, *, most_bytes: int) -> Mapping[str, bytes]:
        """Return the regular files below a folder; no link is followed."""
        with memory_file("job", b"") as given:
            job = {"request": "get", "folder": inside(folder), "most_bytes": most_bytes}
            os.write(given, marshal.dumps(job))
            with await self._ask({"do": "files"}, [given]) as status:
                report = self._alive(await report_of(status))
            if report.get("missing"):
                raise FileNotFoundError(f"the container has no folder {folder}")
            if "too_large" in report:
                raise TooLarge(f"{folder}: {report['too_large']}, {most_bytes:,} bytes at most")
            content = os.pread(given, os.fstat(given).st_size, 0)
        return {os.fsdecode(path): one for path, one in marshal.loads(content).items()}

    async def remove(self, path: str) -> None:
        """Remove a file, a link or a folder, if it is there."""
        if not inside(path):
            raise ValueError("the root of a container is not removed: name a path below it")
        await self._on_files("remove", path=inside(path))

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on a port of the container's own loopback."""
        if self._settings.network == "host":
            raise ContainerError(
                "unsupported", "a container with the host's network has no own one"
            )
        made = await self._socket()
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((LOOPBACK, port))
            made.listen()
        except OSError as error:
            made.close()
            raise ContainerError("backend", f"port {port} of the container: {error}") from None
        return made

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to a port of the container's loopback, or of its host's."""
        made = socket.socket() if self._settings.network == "host" else await self._socket()
        try:
            made.setblocking(False)
            await asyncio.get_running_loop().sock_connect(made, (LOOPBACK, port))
        except BaseException:
            made.close()
            raise
        return made

    async def _socket(self) -> socket.socket:
        """Return a socket of the container's network."""
        with await self._ask({"do": "socket"}) as status:
            status.settimeout(END_S)
            try:
                text, found, _, _ = await asyncio.to_thread(
                    socket.recv_fds, status, LONGEST_REPORT, 1
                )
            except OSError as error:
                raise ContainerError("backend", f"no socket of the container: {error}") from None
            self._alive(json.loads(text) if text else {})
        return socket.socket(fileno=found[0])

    async def changes(self) -> Mapping[str, Change]:
        """Return the paths that differ from the image."""
        upper = self.own / "upper"
        if self._owner.overlays:
            return await asyncio.to_thread(layer_changes, upper, self.lowers)
        return await asyncio.to_thread(copy_changes, upper, self.lowers[-1])

    async def stop_processes(self, network: NetworkKind | None = None) -> None:
        """End all processes by ending the box, which starts again on its files."""
        self._settings = replace(self._settings, network=network or self._settings.network)
        host = self._settings.network == "host"
        with await self._ask({"do": "restart", "host_network": host}) as status:
            report = self._alive(await report_of(status))
        if "ended" in report:
            raise ContainerError("container_died", f"it did not start again: {report['error']}")
        self._outputs.close()
        if network == "host":  # whatever is there: names are looked up as this machine does it
            await self.put({path.lstrip("/"): one for path, one in resolver().items()}, "/")

    async def look(self, path: str) -> tuple[str, bool]:
        """Return where a path really leads in the container, and whether a folder is there."""
        found = await self._on_files("look", paths=[path])
        return tuple(found["paths"][0])

    async def make_folder(self, path: str) -> None:
        """Make a folder, and those that it lies in; links on the way are followed."""
        job = {"folders": [path], "files": {}, "user": "0", "owner": "0", "executable": ()}
        await self._on_files("prepare", **job)

    async def snapshot(self) -> BoxSnapshot:
        """Copy what the container changed."""
        copied = self.own.with_name(f"{self.own.name}-{time.monotonic_ns()}")
        try:
            await self._owner.copy(self.own / "upper", copied)
        except BaseException:
            await asyncio.to_thread(remove_tree, copied)
            raise
        lowers = self.lowers if self._owner.overlays else ()
        self._owner.hold((*lowers, copied))
        return BoxSnapshot(lowers, self.config, copied, self._owner)

    async def close(self) -> None:
        """End the container and remove its files."""
        await self.end()
        if self._place is not None:
            self._place.release()
            self._place = None

    async def end(self) -> None:
        """End the box and remove its layer."""
        self._outputs.close()
        status, self._status = self._status, None
        if status is not None:
            with status:
                status.shutdown(socket.SHUT_WR)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        while await report_of(status):
                            pass
        await asyncio.to_thread(remove_tree, self.own)
        lowers, self.lowers = self.lowers, ()
        await self._owner.release(lowers)

    def _limits(self) -> dict[str, int]:
        own = self._settings
        found = {"NPROC": own.processes, "NOFILE": OPEN_FILES}
        if own.storage_bytes is not None:
            found["FSIZE"] = own.storage_bytes
        if own.memory_bytes is not None and self._owner.groups is None:
            found["AS"] = own.memory_bytes
        return found

    async def _on_files(self, request: str, **job: Any) -> dict[str, Any]:
        content = marshal.dumps({"request": request, **job})
        with (
            memory_file("job", content) as given,
            await self._ask({"do": "files"}, [given]) as status,
        ):
            return self._alive(await report_of(status))

    async def _ask(
        self, request: Mapping[str, Any], descriptors: Sequence[int] = ()
    ) -> socket.socket:
        if self._status is None:
            raise ContainerError("backend", "the container is closed")
        return await self._owner.ask({**request, "name": self.own.name}, descriptors)

    def _alive(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return a report, or raise ContainerError where the container has died."""
        if not report or report.get("died"):
            raise ContainerError("container_died", DIED)
        return checked(report)

    def _check_disk(self) -> None:
        found = os.statvfs(self.own)
        if found.f_bavail * found.f_frsize < FREE_BYTES:
            raise ContainerError(
                "disk_full",
                f"the disk of {self.own.parent} has less than {FREE_BYTES:,} free bytes, so what "
                "commands do there means nothing: set TMPDIR to another disk",
            )


def host_files(settings: ContainerSettings) -> dict[str, bytes]:
    """Return the files of names that an image leaves to whoever runs it."""
    names = "".join(f"127.0.0.1 {one}\n" for one in settings.names).encode()
    return {"/etc/hosts": HOSTS + names, **(resolver() if settings.network == "host" else {})}


def resolver() -> dict[str, bytes]:
    """Return the file that names this machine's resolver, if there is one."""
    file = Path("/etc/resolv.conf")
    return {str(file): file.read_bytes()} if file.exists() else {}


def how_ended(report: Mapping[str, Any], late: bool) -> tuple[str, int | None]:
    """Return how a command ended and its exit code, by its wait status."""
    if late:
        return "wall_time", None
    if os.WIFEXITED(report["exit"]):
        code = os.WEXITSTATUS(report["exit"])
        if code != KILLED or not report["memory"]:  # a shell's, whose own command was killed
            return "exited", code
    return ("memory" if report["memory"] else "signal"), None


async def _ended_within(status: socket.socket, timeout_s: float) -> tuple[dict[str, Any], bool]:
    """Return the report of a command, and whether it was killed because its time was over."""
    reading = asyncio.ensure_future(report_of(status))
    try:
        done, _ = await asyncio.wait({reading}, timeout=timeout_s)
        if done:
            return reading.result(), False
        with contextlib.suppress(OSError):
            status.send(KILL)
        return await reading, True
    finally:
        reading.cancel()


async def report_of(status: socket.socket) -> dict[str, Any]:
    """Return what is reported next; empty where who reports has ended."""
    try:
        said = await asyncio.get_running_loop().sock_recv(status, LONGEST_REPORT)
    except ConnectionResetError:
        said = b""
    found: dict[str, Any] = json.loads(said) if said else {}
    return found


def checked(report: dict[str, Any], kind: str = "backend") -> dict[str, Any]:
    """Return a report that is no failure; raise ContainerError for one that is, or for none."""
    if "unsupported" in report:
        raise ContainerError("unsupported", report["unsupported"])
    if not report:
        raise ContainerError("container_died", "the process that holds containers was killed")
    if "errno" in report:
        number = report["errno"]
        named = "disk_full" if number in FULL else "host_memory" if number == NO_MEMORY else kind
        raise ContainerError(named, report["error"])  # type: ignore[arg-type]
    return report


@contextlib.contextmanager
def memory_file(name: str, content: bytes) -> Iterator[int]:
    """Yield a descriptor of a file in memory."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def make_folder(place: Path, owner: int | None) -> None:
    """Make a folder of a container's root."""
    place.mkdir(mode=0o755, exist_ok=True)
    place.chmod(0o755)
    if owner is not None:
        os.chown(place, owner, owner)


def encoded(word: str) -> bytes:
    """Return a word as a program takes it; raises ValueError where none can be given it."""
    found = word.encode("utf-8", "surrogateescape")
    if b"\0" in found:
        raise ValueError("a command, its environment and its folder have no NUL")
    return found

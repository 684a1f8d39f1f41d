"""Containers for tests that are none: files in memory, and commands of a few words.

A command has lines such as `write PATH TEXT`, `rm PATH`, `print TEXT`, `sleep SECONDS`, `eat`,
`kill`, `exit CODE`; a test script has `expect PATH TEXT` too, which writes the reward. `faults`
decide at each point what fails; the clock is the one of the commands alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composer_mesh.plugins.harbor.containers.port import (
    ContainerSettings,
    FinishedCommand,
    ImageSource,
    NetworkKind,
    TooLarge,
)
from composer_mesh.plugins.harbor.machine import PROBE
from composer_mesh.plugins.harbor.session import WRITE

ENDS = {"eat": "memory", "kill": "signal"}
PROGRAMS = ("sh", "bash", "cat", "python3", "sed")
IMAGE = {
    "/app/given.txt": b"given\n",
    "/usr/bin/python3": b"elf",
    "/bin/sh": b"elf",
    "/bin/bash": b"elf",
    "/usr/lib/python3.11/json/__init__.py": b"",
}
Fault = Callable[["FakeContainer", str], "FinishedCommand | None"]
"""Called at each point, such as "start", "run /tests/test.sh" or "get"; may raise, or return how a
command ends in place of what it would do."""


def finished(
    code: int | None = 0, text: str = "", ended: str = "exited", s: float = 0.1
) -> FinishedCommand:
    """Return how a command ended."""
    return FinishedCommand(code, ended, text.encode(), b"", False, s)  # type: ignore[arg-type]


def no_fault(_container: FakeContainer, _point: str) -> FinishedCommand | None:
    """Let everything work."""
    return None


@dataclass
class FakeSnapshot:
    """The files of a container."""

    files: dict[str, bytes]
    removed: bool = False

    async def remove(self) -> None:
        self.removed = True


@dataclass
class FakeContainer:
    """One machine; `points` are what happened to it."""

    owner: FakeContainers
    settings: ContainerSettings
    files: dict[str, bytes]
    points: list[str] = field(default_factory=list)
    links: set[str] = field(default_factory=set)
    background: list[Callable[[FakeContainer], None]] = field(default_factory=list)
    closed: bool = False
    words: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None)
    """The program that it serves by."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        user: str | None = None,
        environment: Mapping[str, str] = {},
        workdir: str | None = None,
        output_bytes: int = 1 << 20,
    ) -> FinishedCommand:
        point = "probe" if PROBE in argv else "test" if argv[-1] == "/tests/test.sh" else "run"
        if (instead := self._at(point)) is not None:
            return instead
        if point == "probe":
            return finished(text="\n".join(["/app", "/bin/bash", *PROGRAMS]))
        if WRITE in argv:
            self.files[self._path(argv[-1])] = stdin
            return finished()
        if argv[0] in {"sed", "cat"}:
            content = self.files.get(self._path(argv[-1]))
            return finished(1, "no file") if content is None else finished(text=content.decode())
        script = self.files["/tests/test.sh"].decode() if point == "test" else argv[-1]
        return self._script(script, timeout_s)

    def _script(self, script: str, timeout_s: float) -> FinishedCommand:
        used, printed, code = 0.1, [], 0
        for line in script.splitlines():
            word, _, rest = line.strip().partition(" ")
            if word in ENDS:
                return finished(None, ended=ENDS[word])
            if word == "exit":
                code = int(rest)
                break
            used += float(rest) if word == "sleep" else 0.0
            printed += [rest] if word == "print" else []
            self._on_files(word, *rest.partition(" ")[::2])
            if used > timeout_s:
                return finished(None, "\n".join(printed), "wall_time", timeout_s)
        return finished(code, "\n".join(printed), s=used)

    def _on_files(self, word: str, path: str, text: str) -> None:
        if word == "write":
            self.files[self._path(path)] = text.encode()
        elif word == "rm":
            self.files.pop(self._path(path), None)
        elif word == "link":
            self.links.add(path)
        elif word == "expect":
            right = self.files.get(path) == text.encode()
            self.files["/logs/verifier/reward.txt"] = b"1" if right else b"0"

    async def put(
        self,
        files: Mapping[str, bytes],
        folder: str,
        *,
        executable: Collection[str] = (),
        owner: str = "root",
    ) -> None:
        self._at(f"put {folder}")
        self.links = {one for one in self.links if not folder.startswith(one)}
        for name, content in files.items():
            self.files[f"{folder.rstrip('/')}/{name}"] = content

    async def get(self, folder: str, *, most_bytes: int) -> Mapping[str, bytes]:
        self._at(f"get {folder}")
        prefix = f"{folder.rstrip('/')}/"
        found = {p[len(prefix) :]: c for p, c in self.files.items() if p.startswith(prefix)}
        if sum(map(len, found.values())) > most_bytes:
            raise TooLarge(folder)
        if not found and folder in self.files:
            raise FileNotFoundError(folder)
        return found

    async def remove(self, path: str) -> None:
        self._at(f"remove {path}")
        self.links.discard(path)
        for one in [p for p in self.files if p == path or p.startswith(f"{path}/")]:
            del self.files[one]

    async def changes(self) -> Mapping[str, str]:
        self._at("changes")
        image = self.owner.image
        changed = {p: "changed" for p, c in self.files.items() if image.get(p, c) != c}
        added = dict.fromkeys([*(self.files.keys() - image.keys()), *self.links], "added")
        return {**changed, **added, **dict.fromkeys(image.keys() - self.files.keys(), "removed")}

    async def listen(self, port: int) -> socket.socket:
        self._at(f"listen {port}")
        return socket.create_server(("127.0.0.1", 0))

    async def connect(self, port: int) -> socket.socket:
        self._at(f"connect {port}")
        made = socket.create_connection(("127.0.0.1", port))
        made.setblocking(False)
        return made

    async def serve(
        self, entrypoint: Sequence[str] | None, command: Sequence[str] | None
    ) -> FinishedCommand:
        self.words = entrypoint, command
        if (ended := self._at("serve")) is None:
            await asyncio.Event().wait()
        assert ended is not None
        return ended

    async def stop_processes(self, network: NetworkKind | None = None) -> None:
        self._at("stop" if network is None else f"stop {network}")
        for late in self.background:
            late(self)
        self.background.clear()

    async def snapshot(self) -> FakeSnapshot:
        self._at("snapshot")
        return FakeSnapshot(dict(self.files))

    async def close(self) -> None:
        self.closed = True

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"/app/{path}"

    def _at(self, point: str) -> FinishedCommand | None:
        assert not self.closed, f"{point} of a container that was closed"
        self.points.append(point)
        return self.owner.fault(self, point)


@dataclass
class FakeContainers:
    """All containers of a test; no more than `most` at once."""

    fault: Fault = no_fault
    image: dict[str, bytes] = field(default_factory=lambda: dict(IMAGE))
    most: int = 1
    made: list[FakeContainer] = field(default_factory=list)
    sidecars: list[FakeContainer] = field(default_factory=list)
    """Those of services, which take no place."""
    own_loopback: bool = True

    async def prepare(self, image: ImageSource, *, build_s: float = 600.0) -> str:
        return str(image)

    async def start(
        self, settings: ContainerSettings, *, snapshot: FakeSnapshot | None = None
    ) -> FakeContainer:
        live = sum(not one.closed for one in self.made)
        assert live < self.most, "an episode holds its container and waits for another one"
        files = dict(self.image if snapshot is None else snapshot.files)
        container = FakeContainer(self, settings, files)
        self.fault(container, "start")
        self.made.append(container)
        return container

    async def start_sidecar(
        self, settings: ContainerSettings, main: FakeContainer
    ) -> FakeContainer:
        assert not main.closed
        container = FakeContainer(self, settings, dict(self.image))
        self.fault(container, "start service")
        self.sidecars.append(container)
        return container

    def describe(self) -> Iterator[str]:
        yield "containers in memory"

    async def close(self) -> None:
        assert all(one.closed for one in (*self.made, *self.sidecars))

"""Containers without a daemon: unpacked images in bubblewrap boxes, behind the port.

A container has a writable layer over the shared, unpacked image, namespaces of its own, a filter of
system calls, and few rights over its own files only. Its one process pauses; commands enter it.
Where the kernel mounts no overlays for this user, each container has a copy of the image.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_code
from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.mesh.sandboxes.box_process import writable_groups
from composer_mesh.mesh.sandboxes.launchers import filter_file, find_launcher
from composer_mesh.plugins.harbor.containers import dockerfile
from composer_mesh.plugins.harbor.containers.box_container import (
    BoxContainer,
    BoxSnapshot,
    checked,
    make_folder,
    report_of,
)
from composer_mesh.plugins.harbor.containers.port import (
    Container,
    ContainerError,
    ContainerSettings,
    ContainerSnapshot,
    ImageSource,
)
from composer_mesh.plugins.harbor.images.manifest import ImageConfig
from composer_mesh.plugins.harbor.images.store import IDS, ImageStore, made_private
from composer_mesh.plugins.harbor.images.trees import remove_tree
from composer_mesh.tasks.errors import UnusableTask

FIRST_ID = 0x7000_0000
"""This machine's id of root in containers: above those of users, services and /etc/subuid."""
MOST_CONTAINERS = 16
OVERLAYS_SINCE = (0, 11)
BUSY_S = 0.01
"""Wait for a keeper that holds as many requests as it can."""
KEEPER = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from composer_mesh.plugins.harbor.containers.box_keeper import main; main()"
)


class BoxContainers:
    """Starts containers in boxes, `most` at once, from images in the folder `cache`."""

    own_loopback = True

    def __init__(
        self,
        most: int = MOST_CONTAINERS,
        cache: str | Path | None = None,
        first_id: int = FIRST_ID,
        overlays: bool = True,
    ) -> None:
        """Start the keeper. With `overlays` off, each container has a copy of its image."""
        if most < 1:
            raise UnusableTask(f"containers: most is {most}: choose 1 or more")
        self.most, self._names = most, iter(range(1 << 62))
        self.launcher = find_launcher("bubblewrap")
        self.first_id = first_id if os.geteuid() == 0 and _ids_mapped(first_id) else None
        try:
            self.store = ImageStore(Path(cache) if cache else default_cache(), self.first_id)
        except (ContainerError, OSError) as error:
            raise UnusableTask(f"containers: {error}") from None
        self._places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._held: Counter[Path] = Counter()
        self._files = contextlib.ExitStack()
        self.folder = entered_folder()
        self._files.callback(remove_tree, self.folder)
        self.layers = self.folder / "layers"
        made_private(self.layers, 0o700, self.first_id)
        self._descriptors = self._opened()
        self.groups, self.groups_told = writable_groups()
        self.overlays = overlays and self.launcher_numbers >= OVERLAYS_SINCE
        self._control: socket.socket | None = None
        self.keeper = self._start_keeper()

    @property
    def launcher_numbers(self) -> tuple[int, ...]:
        """The version of bubblewrap."""
        return tuple(int(one) for one in self.launcher.version.split(".") if one.isdigit())

    def describe(self) -> Iterator[str]:
        """Yield lines: what containers are, and which settings are not enforced."""
        users = "root only, as this user"
        if self.first_id is not None:
            users = f"root and the users of the image, by ids from {self.first_id} on"
        layer = "an overlay over the image" if self.overlays else "a copy of the image"
        yield f"containers: {self.launcher}; each has {layer}; users: {users}"
        if self.groups is None:
            yield (
                f"  cgroups: none ({self.groups_told}); memory is bounded for each process, and "
                "processes for each user, not for the container"
            )
        else:
            yield f"  cgroups: {self.groups_told}; memory and processes are bounded together"
        for name, left in self.store.left_out.items():
            yield f"  image {name[:12]}: not unpacked: {left}"
        yield "  cpus is not enforced; storage_bytes bounds each file, not all of them together"

    async def prepare(self, image: ImageSource, *, build_s: float = 600.0) -> str:
        """Unpack or build an image; return its identity."""
        if image.build is not None:
            return (await dockerfile.built(self, image, build_s)).identity
        until = time.monotonic() + build_s
        return (await asyncio.to_thread(self.store.unpacked, image.reference, until)).identity

    async def start(
        self, settings: ContainerSettings, *, snapshot: ContainerSnapshot | None = None
    ) -> BoxContainer:
        """Start a container, from a snapshot if one is given. Waits for a place."""
        if settings.network not in ("none", "host"):
            raise ContainerError(
                "unsupported", f"network is {settings.network!r}: boxes have none or host"
            )
        lowers, config = await self._image(settings, snapshot)
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.most))
        await places.acquire()
        try:
            return await self.started(settings, lowers, config, places)
        except BaseException:
            places.release()
            raise

    async def start_sidecar(self, settings: ContainerSettings, main: Container) -> BoxContainer:
        """Start a container in the network of another one; it takes no place."""
        if not isinstance(main, BoxContainer) or settings.network != "none":
            raise ContainerError("unsupported", "only boxes without a host's network share theirs")
        lowers, config = await self._image(settings, None)
        return await self.started(settings, lowers, config, None, main.own.name)

    async def started(
        self,
        settings: ContainerSettings,
        lowers: tuple[Path, ...],
        config: ImageConfig,
        place: asyncio.Semaphore | None,
        network_of: str | None = None,
    ) -> BoxContainer:
        """Start a container on some folders, the lowest first; in the network of another one."""
        own = self.layers / f"{next(self._names)}"
        container = BoxContainer(self, settings, lowers, config, own, place, network_of)
        try:
            async with asyncio.timeout(settings.start_s):
                await container.open()
        except TimeoutError:
            await container.end()
            raise ContainerError(
                "start", f"it was not ready within {settings.start_s:g} s"
            ) from None
        except BaseException:
            await container.end()
            raise
        return container

    async def close(self) -> None:
        """End all containers, the keeper and what was theirs."""
        if self._control is not None:
            self._control.close()
            self._control = None
            await asyncio.to_thread(programs.reap, self.keeper)
            await asyncio.to_thread(self._files.close)

    async def _image(
        self, settings: ContainerSettings, snapshot: ContainerSnapshot | None
    ) -> tuple[tuple[Path, ...], ImageConfig]:
        if snapshot is not None:
            if not isinstance(snapshot, BoxSnapshot):
                raise ContainerError("unsupported", "the snapshot is of another back end")
            return (*snapshot.lowers, snapshot.own), snapshot.config
        if settings.image.build is not None:
            image = await dockerfile.built(self, settings.image, settings.build_s)
            return image.lowers, image.config
        until = time.monotonic() + settings.build_s
        found = await asyncio.to_thread(self.store.unpacked, settings.image.reference, until)
        return (found.root,), found.config

    async def ask(
        self, request: Mapping[str, Any], descriptors: Sequence[int] = ()
    ) -> socket.socket:
        """Send the keeper a request; return the socket that it answers on.

        Waits while the keeper has more requests than it can hold.
        """
        status, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        status.setblocking(False)
        text = json.dumps(request).encode()
        with its_own:
            try:
                while not self._sent(text, [its_own.fileno(), *descriptors]):  # noqa: ASYNC110
                    await asyncio.sleep(BUSY_S)  # a full socket that others send to has no event
            except OSError as error:
                status.close()
                raise ContainerError("backend", f"the keeper of containers: {error}") from None
            except BaseException:
                status.close()
                raise
        return status

    def _sent(self, text: bytes, descriptors: Sequence[int]) -> bool:
        """Send a request to the keeper, to a new one if it was killed; return whether it fits."""
        if self._control is None:
            raise ContainerError("backend", "the containers are closed")
        try:
            socket.send_fds(self._control, [text], descriptors)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._control.close()
            programs.reap(self.keeper)
            self.keeper = self._start_keeper()
            return False
        return True

    def hold(self, folders: Sequence[Path]) -> None:
        """Keep copies of containers' files, where some of the folders are such, until a release."""
        self._held.update(one for one in folders if one.parent == self.layers)

    async def release(self, folders: Sequence[Path]) -> None:
        """Remove those copies that nobody else holds."""
        for one in folders:
            if one.parent == self.layers:
                self._held[one] -= 1
                if not self._held[one]:
                    await asyncio.to_thread(remove_tree, one)

    async def copy(self, source: Path, target: Path) -> None:
        """Copy a folder of files of containers to a new one."""
        make_folder(target, self.first_id)
        request = {"do": "copy", "source": str(source), "target": str(target)}
        with await self.ask(request) as status:
            checked(await report_of(status))

    def _opened(self) -> dict[str, int | None]:
        """Open what containers are made of: their users may be unable to reach the launcher."""
        libraries = self.launcher.libraries
        found = {
            "launcher": os.open(self.launcher.binary, os.O_RDONLY | os.O_CLOEXEC),
            "filter": filter_file(),
        }
        if libraries is not None:
            found["libraries"] = os.open(libraries, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for descriptor in found.values():
            self._files.callback(os.close, descriptor)
        return {"libraries": None, **found}

    def _start_keeper(self) -> int:
        self._control, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        groups = self.groups
        settings = {
            **self._descriptors,
            "control": its_own.fileno(),
            "folder": str(self.layers),
            "first_id": self.first_id,
            "groups": None
            if groups is None
            else {"parents": [str(one) for one in groups.parents], "unified": groups.unified},
        }
        passed = [one for one in self._descriptors.values() if one is not None]
        command = python_code(KEEPER, str(programs.PACKAGES), json.dumps(settings))
        command.insert(1, "-S")
        try:
            return programs.start_tied(command, {"PATH": os.defpath}, [*passed, its_own.fileno()])
        finally:
            its_own.close()


def default_cache() -> Path:
    """Return where unpacked images are kept: of the machine for root, else of the user."""
    if os.geteuid() == 0:
        return Path("/var/cache/composer-mesh/containers")
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "composer-mesh/containers"


def _ids_mapped(first: int) -> bool:
    """Whether this process may give its children the ids from `first` on."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside_first, _, count = map(int, line.split())
        if inside_first <= first and first + IDS <= inside_first + count:
            return True
    return False

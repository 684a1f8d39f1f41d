"""The port between tasks and containers. Data and protocols only; no back end is known here.

A container is the machine of one episode: its files and its background processes live on between
commands. A command that fails, is late or exhausts its own memory is a result; what fails through
nobody's fault is a `ContainerError`, which is never a reward and never an observation.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from composer_mesh.tasks.sandbox import MIB, SandboxError, check_path

Kind = Literal[
    "image_missing",  # no such image, file, name or platform
    "image_digest",  # bytes that are not what their digest says
    "image_invalid",  # an image that breaks its format, or exceeds the store's limits
    "registry",  # unreachable, too slow, refused, or an answer that no registry gives
    "build",  # a Dockerfile that fails or uses what this back end has not
    "start",  # a container that cannot be started, or was not started in time
    "disk_full",  # the host's disk
    "host_memory",  # the host's memory
    "container_died",  # a container that ended, or was killed from outside
    "backend",  # a daemon, or the process that starts boxes, is unreachable or answers wrongly
    "unsupported",  # settings that this back end cannot meet
]
Change = Literal["added", "changed", "removed"]
NetworkKind = Literal["none", "host"]
OUTPUT_BYTES = 4 * MIB


class ContainerError(SandboxError):
    """A failure of the infrastructure; `kind` is for machines, `detail` for people."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class TooLarge(ValueError):
    """A folder holds more than the caller takes: the doing of what ran in the container."""


@dataclass(frozen=True)
class ImageSource:
    """An image: `reference` or `build`, a folder with a Dockerfile; exactly one of the two.

    `dockerfile` is the path of the Dockerfile below that folder, and `arguments` are values of its
    ARGs. A reference is `docker.io/library/python:3.11`, `NAME@sha256:HEX`, `oci:DIR:NAME`,
    `oci-archive:FILE[:NAME]`, `docker-archive:FILE[:NAME]` or `rootfs:DIR`.
    """

    reference: str = ""
    build: Path | None = None
    dockerfile: str = "Dockerfile"
    arguments: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.reference) == (self.build is not None):
            raise ValueError(
                f"an image has a reference or a folder to build, not both or none: got "
                f"{self.reference!r} and {self.build}"
            )

    def __str__(self) -> str:
        return self.reference or f"the Dockerfile in {self.build}"


@dataclass(frozen=True)
class ContainerSettings:
    """What a container is made of, and what it may use; None is no bound.

    `workdir` and `user` override the image's; a user is a name or a number, with `:group` or
    without. Of the host only `mounts` are visible: folders by absolute path in the container, which
    may be read and not written. `names` are host names of the container's own loopback. `build_s`
    bounds pulling and building the image, `start_s` the start of the container.
    """

    image: ImageSource
    cpus: float | None = None
    memory_bytes: int | None = None
    storage_bytes: int | None = None
    processes: int = 512
    network: NetworkKind = "none"
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    mounts: Mapping[str, Path] = field(default_factory=dict)
    names: Sequence[str] = ()
    build_s: float = 600.0
    start_s: float = 60.0


@dataclass(frozen=True)
class FinishedCommand:
    """How a command ended. `exit_code` is None where a signal or a limit ended it.

    A command that is no program of the container has exit code 127, one that cannot be executed
    126, with the reason in `errors`.
    """

    exit_code: int | None
    ended: Literal["exited", "signal", "wall_time", "memory"]
    output: bytes
    errors: bytes
    output_cut: bool
    seconds: float


class ContainerSnapshot(Protocol):
    """The files of a container at one moment, from which others start; no processes."""

    async def remove(self) -> None:
        """Remove the files. Containers that were started from it live on."""


class Container(Protocol):
    """One episode's machine. Every method raises ContainerError where the container has died."""

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
        """Run a command. Waits for its end, not for that of processes that it leaves running.

        Of standard output and standard error `output_bytes` each are kept.
        """

    async def put(
        self,
        files: Mapping[str, bytes],
        folder: str,
        *,
        executable: Collection[str] = (),
        owner: str = "root",
    ) -> None:
        """Write files below an absolute folder, which is made if it is missing.

        Names are relative paths. No link is followed: a link or a file where a folder is needed,
        in `folder` too, is replaced by a folder.
        """

    async def get(self, folder: str, *, most_bytes: int) -> Mapping[str, bytes]:
        """Return the regular files below an absolute folder by relative path; no link is followed.

        Raises FileNotFoundError where there is no such folder, and TooLarge.
        """

    async def remove(self, path: str) -> None:
        """Remove a file, a link or a whole folder from outside, if it is there."""

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on a port of the container's own loopback.

        Programs in the container reach who accepts on it, and nothing else of the host. It is the
        caller's to close. Raises ContainerError: "unsupported" where a back end has no such thing.
        """

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to a port of the loopback that programs in the container have.

        It is the caller's to close. Raises OSError where nothing listens there, and ContainerError:
        "unsupported" where a back end has no such thing.
        """

    async def changes(self) -> Mapping[str, Change]:
        """Return the absolute paths that differ from the image, read from outside.

        These are files and links; a folder that was removed whole is one path. Mode counts.
        """

    async def stop_processes(self, network: NetworkKind | None = None) -> None:
        """End every process that commands started; files stay. Waits until all are gone.

        The container has another `network` afterwards if one is given. Raises ContainerError:
        "unsupported" where a back end cannot change it.
        """

    async def snapshot(self) -> ContainerSnapshot:
        """Copy the files. What processes write meanwhile may be in it or not."""

    async def close(self) -> None:
        """End the container and remove its files."""


class ServiceContainer(Container, Protocol):
    """A container in the network of another one, with a program of its own."""

    async def serve(
        self, entrypoint: Sequence[str] | None, command: Sequence[str] | None
    ) -> FinishedCommand:
        """Run the image's own program. Waits for its end.

        `entrypoint` and `command` replace those of the image; an entry point without a command
        has none, as in Compose. Raises ContainerError with the kind "start" if there is no program.
        """


class Containers(Protocol):
    """A back end; one of a process, with a bounded number of containers at once."""

    own_loopback: bool
    """Whether `listen`, `connect`, `start_sidecar` and a change of the network work."""

    async def prepare(self, image: ImageSource, *, build_s: float = 600.0) -> str:
        """Pull, unpack or build an image; return the identity of its content."""

    async def start(
        self, settings: ContainerSettings, *, snapshot: ContainerSnapshot | None = None
    ) -> Container:
        """Start a container, from a snapshot if one is given. Waits for a place.

        Raises ContainerError, at once with the kind "unsupported" for settings that this back end
        cannot meet.
        """

    async def start_sidecar(self, settings: ContainerSettings, main: Container) -> ServiceContainer:
        """Start a container in the network of `main`, which outlives the processes of both.

        It takes no place of its own. Raises ContainerError: "unsupported" where a back end has no
        such thing.
        """

    def describe(self) -> Iterator[str]:
        """Yield lines: what containers are here, and which settings are not enforced."""

    async def close(self) -> None:
        """End all containers."""


def inside(path: str) -> str:
    """Return an absolute path of a container without its leading slash; raises ValueError."""
    if not path.startswith("/"):
        raise ValueError(f"{path[:300]!r} is no absolute path of a container: begin it with /")
    rest = path.strip("/")
    if rest:
        check_path(rest)
    return rest

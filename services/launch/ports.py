"""The port to launchers, one per kind of cluster, and the handle of a launched run.

    order -> plan (exactly what will be written and run) -> submit -> handle -> reach, state, stop

Only types; `command` uses them, and one module per kind implements them.

Launchers by kind of cluster, imported on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, ConfigDict, Field

from composer_mesh.configs import plugins
from composer_mesh.configs.cluster import ClusterKind
from composer_mesh.configs.schema import Config
from composer_mesh.planning.host_capacity import HostResources

State = Literal["waiting", "running", "ended", "unknown"]


class LaunchRefused(Exception):
    """A run cannot be launched like this: what was found, the bound and the repair."""


class LaunchFailed(RuntimeError):
    """The cluster did not carry out a request; carries its message."""


@dataclass(frozen=True)
class Order:
    """A launch order: the resolved config, its hosts and the paths.

    The config has been checked, so a scheduler has hosts to request (`planning.host_capacity`).
    `output` and `folder` are absolute; `folder` is the user's working directory, to which the
    config's paths are relative. `python` is the interpreter on the hosts.
    """

    config: Config
    hosts: tuple[HostResources, ...]
    output: Path
    folder: Path
    python: str
    resume: bool = False


@dataclass(frozen=True)
class Plan:
    """Exactly what submitting does: writes these files, then runs these commands, in order.

    `secret` names files that are not printed.
    """

    files: Mapping[Path, str] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    secret: frozenset[Path] = frozenset()


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or "\0" in str(path) or len(str(path)) > LONGEST_WORD:
        raise ValueError("it is not an absolute path")
    return path


LONGEST_WORD = 4096
Folder = Annotated[Path, AfterValidator(_absolute)]
Program = Annotated[str, Field(pattern=r"^[^\x00-\x1f=-][^\x00-\x1f=]*$", max_length=LONGEST_WORD)]
Namespace = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$")]
Context = Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.:/@+-]{0,252})?$")]
Word = Annotated[str, Field(max_length=LONGEST_WORD)]
Words = Annotated[tuple[Word, ...], Field(max_length=256)]


@dataclass(frozen=True)
class Handle:
    """A launched run's identity; stored as `launch.json` in the run's directory.

    `run` is the run's directory on the controller's host. `job` is the cluster's name for it: a
    process, a job, an object. It holds no command: each launcher builds those of its kind, from
    `destination` and `options` of ssh, `setup` of Slurm, or `context` and `namespace` of kubectl;
    they are empty for other kinds, and `destination` is empty if the controller is on this machine.
    The fields are checked where the file is read.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    kind: ClusterKind
    run: Folder
    job: str
    python: Program
    folder: Folder
    log: Folder | None = None
    destination: str = ""
    options: Words = ()
    setup: Words = ()
    context: Context = ""
    namespace: Namespace = ""


class OnlyTheController:
    """Base of launchers that need no action when a controller is stopped."""

    def stopping(self, handle: Handle) -> None:
        """Called before the controller is requested to stop."""

    def stopped(self, handle: Handle) -> None:
        """Called after a controller that was requested to stop has ended."""


class Launcher(Protocol):
    """A launcher: raises `LaunchRefused` before it changes anything, `LaunchFailed` after."""

    def plan(self, order: Order) -> Plan:
        """Return what would be done; changes and queries nothing outside this process."""

    def submit(self, order: Order, plan: Plan) -> Handle:
        """Submit the run. Waits until the cluster has accepted it, not until it runs."""

    def reach(self, handle: Handle) -> tuple[str, ...]:
        """Return the prefix of a command on the controller's host; empty if that is this one."""

    def state(self, handle: Handle) -> tuple[State, str]:
        """Return the run's current state, and the cluster's name for it."""

    def follow(self, handle: Handle) -> Iterator[str]:
        """Yield the controller's output lines as they are written, until the run has ended."""

    def stop(self, handle: Handle, grace_s: float) -> None:
        """End the run and all that it started, after `grace_s` for a checkpoint."""

    def stopping(self, handle: Handle) -> None:
        """Prepare for a stop that is requested from the controller directly."""

    def stopped(self, handle: Handle) -> None:
        """Release what remains after a controller that was requested to stop has ended."""


def launcher_of(kind: str) -> Launcher:
    """Return the launcher of a kind; raise RegistrationError if nobody registers it."""
    launcher: Launcher = plugins.load("launchers", kind)()
    return launcher

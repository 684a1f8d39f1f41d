"""What a launcher of each kind of cluster does, and what is left of a launch: a handle.

    order -> plan (exactly what will be written and run) -> submit -> handle -> reach, state, stop

Only shapes; `command` uses them, one module for each kind fulfils them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from composer_mesh.configs.cluster import ClusterKind
from composer_mesh.configs.schema import Config
from composer_mesh.planning.host_capacity import HostResources

State = Literal["waiting", "running", "ended", "unknown"]


class LaunchRefused(Exception):
    """A run that cannot be launched so: what was found, the bound and the repair."""


class LaunchFailed(RuntimeError):
    """The cluster did not do what it was asked for: its own words."""


@dataclass(frozen=True)
class Order:
    """What is to be launched: the resolved config, its hosts, and where things are.

    The config has been accepted, so a scheduler has hosts to ask for (`planning.host_checks`).
    `output` and `folder` are absolute; `folder` is where the user stands, against which paths of
    the config are meant. `python` is the interpreter on the hosts.
    """

    config: Config
    hosts: tuple[HostResources, ...]
    output: Path
    folder: Path
    python: str
    resume: bool = False


@dataclass(frozen=True)
class Plan:
    """Exactly what submitting does: files that are written, programs that are run, in this order.

    `secret` names files that a person is not shown.
    """

    files: Mapping[Path, str] = field(default_factory=dict)
    commands: Sequence[Sequence[str]] = ()
    secret: frozenset[Path] = frozenset()


@dataclass(frozen=True)
class Handle:
    """A launched run: how it is found again; kept as `launch.json` in the run's directory.

    `run` is the run's directory where the controller is. `job` is what the cluster calls it: a
    process, a job, an object. `reach` is put before a command to run it where the controller is,
    empty where that is here. `namespace` and `log` are empty or None where the kind has none.
    """

    kind: ClusterKind
    run: Path
    job: str
    python: str
    folder: Path
    reach: tuple[str, ...] = ()
    log: Path | None = None
    namespace: str = ""


class OnlyTheController:
    """For a cluster that need not know when its controller is asked to stop."""

    def stopping(self, handle: Handle) -> None:
        """The controller is about to be asked to stop."""

    def stopped(self, handle: Handle) -> None:
        """The controller was asked, and has ended."""


class Launcher(Protocol):
    """One kind of cluster. Raises `LaunchRefused` before, `LaunchFailed` after anything is done."""

    def plan(self, order: Order) -> Plan:
        """What would be done; changes and asks nothing outside this process."""
        ...

    def submit(self, order: Order, plan: Plan) -> Handle:
        """Do it. Waits until the cluster has taken it, not until it runs."""
        ...

    def state(self, handle: Handle) -> tuple[State, str]:
        """How it is now, and the cluster's own word for it."""
        ...

    def follow(self, handle: Handle) -> Iterator[str]:
        """The lines that the controller prints, as they come, until the run has ended."""
        ...

    def stop(self, handle: Handle, grace_s: float) -> None:
        """End it, and everything that it has brought up; a run gets `grace_s` for a checkpoint."""
        ...

    def stopping(self, handle: Handle) -> None:
        """Know that the controller is about to be asked to stop, by somebody else."""
        ...

    def stopped(self, handle: Handle) -> None:
        """Give back what is left, once a controller that was asked to stop has ended."""
        ...

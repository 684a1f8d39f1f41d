"""Where the processes of a run are: the placement of a config on its hosts, and what each is told.

The decision is `configs.placing`'s. Here is which hosts it is about, what could not be known, and
the environment that brings its part to a process (`mesh.share`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.memory import in_gb
from composer_mesh.configs.model_sizes import ModelSizes, UnknownSizes
from composer_mesh.configs.placing import Placed, Placement, described_hosts, place
from composer_mesh.configs.processes import Process, sizes_of
from composer_mesh.configs.room import Host
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.machine import this_machine
from composer_mesh.mesh.share import share_env

Envs = Callable[[int], Mapping[str, str]]
"""The environment of the process with this number among those of its kind."""

SLACK = 0.98
"""What a kernel leaves of a machine's memory is a little less than what its owner counts."""


class WrongHost(ConfigError):
    """The hosts that a config describes are not where the run is started."""


class NoSeat(Exception):
    """A process beyond the placement that needs cores or GPUs of its own: its kind and number."""

    def __init__(self, kind: str, number: int, own: str) -> None:
        super().__init__(kind, number, own)

    def __str__(self) -> str:
        kind, number, own = self.args
        return (
            f"{kind}-{number} needs {own} of its own, and the run was placed without it: set the "
            f"number of {kind} processes in the config, where it is part of the placement"
        )


@dataclass(frozen=True)
class Seats:
    """The placement of one run; `notes` say where hosts come from and what is not in the sums."""

    placement: Placement
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, found: Callable[[], Host] = this_machine) -> "Seats":
        """Place a run; raises `CannotPlace` or `UnfitPlace`. Looks for hosts if none is described.

        Memory of a model whose sizes nobody knows is left out of the sums, and that is said.
        """
        described = described_hosts(config.placement)
        hosts = described or (found(),)
        notes = (
            [] if described else [f"found {about(hosts[0])}; describe hosts to check for others"]
        )
        if (folder := config.policy.path) is not None and not folder.is_dir():
            notes.append(f"{folder} is not there: its sizes are policy.sizes, nothing else checked")
        sizes: ModelSizes | None = None
        try:
            sizes = sizes_of(config.policy)
        except UnknownSizes as unknown:
            notes.append(f"memory of models is not in these sums: {unknown}")
        return cls(place(config, hosts, sizes), tuple(notes))

    def env(self, kind: str, number: int = 0) -> dict[str, str]:
        """What the process of this number is told, whichever of its place's processes it is.

        Beyond the placement it shares what others share; raises `NoSeat` where the kind does not.
        """
        seats = [one for one in self.placement.placed if one.process.kind == kind]
        if number >= len(seats) and (own := _own(seats[0].process)):
            raise NoSeat(kind, number, own)
        return _env(seats[min(number, len(seats) - 1)])

    def envs(self, kind: str) -> Envs:
        """`env` of one kind."""
        return lambda number: self.env(kind, number)


def refuse_other_hosts(config: Config, found: Callable[[], Host] = this_machine) -> None:
    """Refuse to start what is described for other machines than this one; raises `WrongHost`."""
    described = described_hosts(config.placement)
    if len(described) > 1:
        raise WrongHost(
            f"placement.hosts describes {len(described)} hosts, but a run is started on this "
            "machine alone: check shows the placement, train needs one host described, or none"
        )
    for host in described:
        here = found()
        said = (host.cores, host.gpus, host.memory * SLACK, host.gpu_memory * SLACK)
        if any(more > less for more, less in zip(said, _figures(here), strict=True)):
            raise WrongHost(
                f"placement.hosts describes {about(host)}, but this machine is {about(here)}: "
                "start the run there, or correct placement.hosts"
            )


def about(host: Host) -> str:
    """`localhost: 2 cores, 23.5 GB, no GPU`."""
    gpus = f"{host.gpus} GPUs of {in_gb(host.gpu_memory)} GB" if host.gpus else "no GPU"
    return f"{host.name}: {host.cores} cores, {in_gb(host.memory)} GB, {gpus}"


def _figures(host: Host) -> tuple[float, ...]:
    return (host.cores, host.gpus, host.memory, host.gpu_memory)


def _own(process: Process) -> str:
    return "a GPU" if process.gpus else "cores" if process.cores else ""


def _env(placed: Placed) -> dict[str, str]:
    threads = placed.process.threads
    return share_env(threads, placed.cores, placed.gpus, placed.gpu_share)

"""The section `[placement]`: cores, GPUs and memory of hosts and processes.

Describes what is wanted; `planning.placement_solver` decides which process gets what.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import (
    MOST_CORES,
    MOST_GB,
    MOST_HOSTS,
    Cores,
    Gigabytes,
    Section,
    repeated,
)

HostNames = Annotated[tuple[str, ...], Field(strict=False, max_length=MOST_HOSTS)]


class HostConfig(Section):
    """One host, or several identical ones."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the host; with count above 1 the hosts are named name-0, name-1 and so on."""

    count: Annotated[int, Field(ge=1, le=MOST_HOSTS)] = 1
    """Number of identical hosts."""

    cores: Cores
    """CPU cores available to the run."""

    memory_gb: Gigabytes
    """Memory available to the run, in GB of 2**30 bytes."""

    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs available to the run."""

    gpu_memory_gb: Annotated[float, Field(ge=0, le=MOST_GB)] = 0.0
    """Memory of each GPU, in GB of 2**30 bytes."""

    def _problems(self) -> Iterator[str]:
        if bool(self.gpus) != bool(self.gpu_memory_gb):
            yield (
                f"gpus is {self.gpus} but gpu_memory_gb is {self.gpu_memory_gb:g}, and a GPU "
                "without memory holds no model: set both, or neither"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of these hosts."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.count))


class PlaceConfig(Section):
    """Resources of each process of one kind of actor."""

    cores: Annotated[int, Field(ge=0, le=MOST_CORES)] = 0
    """Exclusive cores of each process; 0 allows all cores that are not exclusive to another."""

    memory_gb: Gigabytes | None = None
    """Host memory of each process, in GB of 2**30 bytes; estimated when not set."""

    hosts: HostNames = ()
    """Allowed hosts, by name or by the name of identical ones; empty is any host."""


class GpuPlaceConfig(PlaceConfig):
    """Resources of each process of a kind that holds a model."""

    gpus: Annotated[float, Field(ge=0, le=64)] = 0.0
    """GPUs of each process. 0 computes on the CPU, and a fraction such as 0.5 shares one GPU with
    other fractions. Above 1 it must be a whole number."""

    def _problems(self) -> Iterator[str]:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            yield (
                f"gpus is {self.gpus:g} but above 1 must be a whole number, because only one GPU "
                f"can be shared: set it to {int(self.gpus)} or {int(self.gpus) + 1}"
            )
        if 0 < self.gpus < 0.001:
            yield (
                f"gpus is {self.gpus:g} but shares are counted in thousandths: raise it to 0.001 "
                "or more, or set it to 0"
            )


class PlacementConfig(Section):
    """Hosts, and the resources of each kind of process."""

    hosts: Annotated[tuple[HostConfig, ...], Field(strict=False, max_length=MOST_HOSTS)] = ()
    """Hosts of the run; when empty, this machine or its workers, as detected."""

    fork_server: bool = True
    """Fork processes from one on each host that has imported torch already. A fork starts in a
    tenth of the time and shares the imported memory. Linux only; generators with vLLM are never
    forked."""

    colocate: bool = False
    """Let trainer and SDPO teachers use their GPUs in turns with generators and reference.

    Whoever waits has its model and optimizer state in the host's memory. Shares of a GPU count
    within a turn. Needs schedule.max_lag = 0.
    """

    controller: PlaceConfig = Field(default_factory=PlaceConfig)
    """The process that runs the command."""

    trainer: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """Each trainer rank."""

    generator: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """Each generator."""

    environment: PlaceConfig = Field(default_factory=PlaceConfig)
    """Each environment actor."""

    rollouts: PlaceConfig = Field(default_factory=PlaceConfig)
    """Each rollout worker."""

    sdpo_teacher: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """Each SDPO teacher."""

    teacher_replay: PlaceConfig = Field(default_factory=PlaceConfig)
    """Each actor that queries external teachers."""

    judge: PlaceConfig = Field(default_factory=PlaceConfig)
    """Each actor that queries judges."""

    reference: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """The frozen policy that scores pairs."""

    hint_writer: PlaceConfig = Field(default_factory=PlaceConfig)
    """The actor that queries the hint writer."""

    expert_server: PlaceConfig = Field(default_factory=PlaceConfig)
    """The server of the builtin teachers."""

    def of(self, kind: str) -> PlaceConfig:
        """Return the resources of each process of a kind."""
        found = getattr(self, kind)
        assert isinstance(found, PlaceConfig)
        return found

    def gpus(self, kind: str) -> float:
        """Return the GPUs of each process of a kind; 0 for kinds that use none."""
        place = self.of(kind)
        return place.gpus if isinstance(place, GpuPlaceConfig) else 0.0

    def _problems(self) -> Iterator[str]:
        count = sum(host.count for host in self.hosts)
        if count > MOST_HOSTS:
            yield f"hosts describes {count} hosts but a run has at most {MOST_HOSTS}: lower count"
        for name in repeated(name for host in self.hosts for name in {host.name, *host.names}):
            yield (
                f"hosts has {name!r} several times, and a process could not be placed by it: give "
                "each host another name"
            )
        known = {name for host in self.hosts for name in (host.name, *host.names)}
        for kind in KINDS:
            for name in self.of(kind).hosts:
                if name not in known:
                    others = ", ".join(sorted(known)[:20])
                    listed = others or "none, so this machine is the only one"
                    yield (
                        f"{kind}.hosts names {name!r} but [[placement.hosts]] describes {listed}: "
                        "correct the name, or describe that host"
                    )


KINDS = tuple(
    name
    for name in PlacementConfig.model_fields
    if name not in ("hosts", "fork_server", "colocate")
)

"""Which process may use which cores, GPUs and memory of which host: the section `[placement]`.

Describes what is wanted; `planning.placement_solver` decides which process gets what.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import Count, NotNegative, Positive, Section

HostNames = Annotated[tuple[str, ...], Field(strict=False)]


class HostConfig(Section):
    """One host, or several that are alike."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the host; where count is above 1 they are called name-0, name-1 and so on."""

    count: Count = 1
    """Hosts like this one."""

    cores: Count
    """CPU cores that the run may use."""

    memory_gb: Positive
    """Memory that the run may use, in GB of 2**30 bytes."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs that the run may use."""

    gpu_memory_gb: NotNegative = 0.0
    """Memory of each GPU, in GB of 2**30 bytes."""

    @model_validator(mode="after")
    def _gpus_have_memory(self) -> Self:
        if bool(self.gpus) != bool(self.gpu_memory_gb):
            raise ValueError(
                f"gpus is {self.gpus} but gpu_memory_gb is {self.gpu_memory_gb:g}, and a GPU "
                "without memory holds no model: set both, or neither"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of these hosts."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.count))


class PlaceConfig(Section):
    """What each process of one kind of actor is given."""

    cores: Annotated[int, Field(ge=0)] = 0
    """Cores of its own; 0 lets it run on every core that no other process has for its own."""

    memory_gb: Positive | None = None
    """Memory of the host that it is given, in GB of 2**30 bytes; without it, what is estimated."""

    hosts: HostNames = ()
    """Hosts that may have it, by name or by the name of several alike; empty is any host."""


class GpuPlaceConfig(PlaceConfig):
    """What each process of a kind that holds a model is given."""

    gpus: NotNegative = 0.0
    """GPUs of each process: 0 computes on the CPU, a share such as 0.5 leaves the rest of that GPU
    to others which have shares, and above 1 it must be a whole number."""

    @model_validator(mode="after")
    def _gpus_are_shares_or_whole(self) -> Self:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(
                f"gpus is {self.gpus:g} but above 1 must be a whole number, because only one GPU "
                f"can be shared: set it to {int(self.gpus)} or {int(self.gpus) + 1}"
            )
        if 0 < self.gpus < 0.001:
            raise ValueError(
                f"gpus is {self.gpus:g} but shares are counted in thousandths: raise it to 0.001 "
                "or more, or set it to 0"
            )
        return self


class PlacementConfig(Section):
    """Hosts, and what each kind of process is given of them."""

    hosts: Annotated[tuple[HostConfig, ...], Field(strict=False)] = ()
    """The hosts of the run; without any, this machine or its workers, as they are found."""

    controller: PlaceConfig = Field(default_factory=PlaceConfig)
    """The process that runs the command."""

    trainer: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """Each trainer rank."""

    generator: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """Each generator."""

    environment: PlaceConfig = Field(default_factory=PlaceConfig)
    """Each environment actor."""

    sdpo_teacher: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """Each SDPO teacher."""

    teacher_replay: PlaceConfig = Field(default_factory=PlaceConfig)
    """Each actor that asks external teachers."""

    reference: GpuPlaceConfig = Field(default_factory=GpuPlaceConfig)
    """The frozen policy that scores pairs."""

    hint_writer: PlaceConfig = Field(default_factory=PlaceConfig)
    """The actor that asks for hints."""

    expert_server: PlaceConfig = Field(default_factory=PlaceConfig)
    """The server of the builtin teachers."""

    def of(self, kind: str) -> PlaceConfig:
        """What each process of a kind is given."""
        found = getattr(self, kind)
        assert isinstance(found, PlaceConfig)
        return found

    def gpus(self, kind: str) -> float:
        """GPUs of each process of a kind; 0 where the kind has no use for one."""
        place = self.of(kind)
        return place.gpus if isinstance(place, GpuPlaceConfig) else 0.0

    @model_validator(mode="after")
    def _hosts_have_names_of_their_own(self) -> Self:
        names = [name for host in self.hosts for name in {host.name, *host.names}]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"hosts has {name!r} {names.count(name)} times, and a process could not be "
                    "told which: give each host another name"
                )
        return self

    @model_validator(mode="after")
    def _wanted_hosts_are_there(self) -> Self:
        known = {name for host in self.hosts for name in (host.name, *host.names)}
        for kind in KINDS:
            for name in self.of(kind).hosts:
                if name not in known:
                    listed = ", ".join(sorted(known)) or "none, so this machine is the only one"
                    raise ValueError(
                        f"{kind}.hosts names {name!r} but [[placement.hosts]] describes {listed}: "
                        "correct the name, or describe that host"
                    )
        return self


KINDS = tuple(name for name in PlacementConfig.model_fields if name != "hosts")

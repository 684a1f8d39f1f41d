"""Assigns processes to hosts, cores and GPUs: a pure function of a run and its hosts.

    place(config, hosts, sizes) -> Placement         or CannotPlace, with the sums
    place_again(process, placed, hosts) -> Placed    next to placed processes; or NoCapacity

First-fit decreasing: the largest process first, each on the first host that it fits, so placement
is deterministic. Not every combination is tried; if a possible one is not found, naming hosts in
the config helps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from composer_mesh.configs.placement import KINDS, PlacementConfig
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.planning.host_capacity import HostCapacity, HostResources, Placed
from composer_mesh.planning.memory import GB, total
from composer_mesh.planning.placement_errors import (
    CannotPlace,
    NoCapacity,
    cannot_place,
    no_capacity,
)
from composer_mesh.planning.process_specs import Process, processes_of


@dataclass(frozen=True)
class Placement:
    """Every process of a run, in the config's order, and its hosts."""

    hosts: tuple[HostResources, ...]
    placed: tuple[Placed, ...]

    def named(self, name: str) -> Placed | None:
        """Return the placement of the process of this name; None if there is none."""
        return next((one for one in self.placed if one.process.name == name), None)

    def on(self, host: str) -> tuple[Placed, ...]:
        """Return the processes of one host."""
        return tuple(one for one in self.placed if one.host == host)

    def of_kind(self, kind: str) -> tuple[Placed, ...]:
        """Return the processes of one kind, in the order of their numbers."""
        return tuple(one for one in self.placed if one.process.kind == kind)


WITH_CONTROLLER = ("controller", "expert_server")
"""Kinds that stay on the controller's machine in every run."""
ITS_MACHINE = "controller's"
"""Name of the controller's machine if it is not one of the hosts; no host can have it."""
Aliases = Mapping[str, frozenset[str]]
"""Further names of hosts in a config."""


def stay_with_controller(config: Config) -> tuple[str, ...]:
    """Return the kinds that run on the controller's machine; all of them in a local run.

    An ssh tunnel does not forward the run's own HTTP, so clients of its expert server stay there
    too.
    """
    cluster = config.cluster
    if not cluster.remote:
        return KINDS
    tunnelled = cluster.ssh is not None and cluster.ssh.tunnel and config.serves_experts
    return (*WITH_CONTROLLER, *(("teacher_replay", "hint_writer") if tunnelled else ()))


def described_hosts(placement: PlacementConfig) -> tuple[HostResources, ...]:
    """Return the hosts that a config describes; empty if it describes none."""
    return tuple(
        HostResources(
            name, one.cores, int(one.memory_gb * GB), one.gpus, int(one.gpu_memory_gb * GB)
        )
        for one in placement.hosts
        for name in one.names
    )


def aliases_of(placement: PlacementConfig) -> dict[str, frozenset[str]]:
    """Return the shared name of identical hosts, for each of them."""
    return {name: frozenset({one.name}) for one in placement.hosts for name in one.names}


def place(
    config: Config,
    hosts: Sequence[HostResources],
    sizes: ModelSizes | None,
    aliases: Aliases | None = None,
    teacher: ModelSizes | None = None,
) -> Placement:
    """Place each process of a run; raises `CannotPlace`, or `UnfitPlace` whatever the hosts.

    Without sizes the memory of models is left out; `teacher` are those of an SDPO teacher that is
    another model. Processes that stay on a controller's machine
    which is not a host are in no sum.
    """
    aliases = aliases_of(config.placement) if aliases is None else aliases
    processes = processes_of(config, sizes, teacher)
    if not config.cluster.remote:
        return place_processes(processes, hosts, aliases)
    staying = stay_with_controller(config)
    if config.cluster.kind == "slurm":  # the batch job's controller is on its first host
        first = (hosts[0].name,)
        bound = [replace(p, hosts=first) if p.kind in staying else p for p in processes]
        return place_processes(bound, hosts, aliases)
    found = place_processes([p for p in processes if p.kind not in staying], hosts, aliases)
    own = [Placed(p, ITS_MACHINE) for p in processes if p.kind in staying]
    order = [p.name for p in processes]
    placed = sorted([*own, *found.placed], key=lambda one: order.index(one.process.name))
    return Placement(found.hosts, tuple(placed))


def place_processes(
    processes: Sequence[Process], hosts: Sequence[HostResources], aliases: Aliases | None = None
) -> Placement:
    """Place each process; raises `CannotPlace`."""
    capacities = [_capacity(host, aliases or {}) for host in hosts]
    places = range(len(processes))
    found: dict[int, Placed] = {}
    for index in sorted(places, key=lambda one: _size(processes[one])):
        process = processes[index]
        capacity = next(
            (one for one in _preferred(process, capacities) if not one.why_not(process)), None
        )
        if capacity is None:
            raise CannotPlace(cannot_place(process, processes, capacities))
        found[index] = capacity.take(process)
    left = {capacity.host.name: capacity.shared_cores for capacity in capacities}
    return Placement(
        tuple(hosts),
        tuple(_on_what_is_left(found[index], left[found[index].host]) for index in places),
    )


def place_again(
    process: Process, placed: Sequence[Placed], hosts: Sequence[HostResources], aliases: Aliases
) -> Placed:
    """Place one more process without moving the others; raises `NoCapacity`.

    Other processes that run on its exclusive cores share them until they restart.
    """
    capacities = [_capacity(host, aliases) for host in hosts]
    for capacity in capacities:
        for one in placed:
            if one.host == capacity.host.name:
                capacity.hold(one)
    for capacity in _preferred(process, capacities):
        if not capacity.why_not(process):
            return _on_what_is_left(capacity.take(process), capacity.shared_cores)
    raise NoCapacity(no_capacity(process, capacities))


def _capacity(host: HostResources, aliases: Aliases) -> HostCapacity:
    return HostCapacity(host, aliases.get(host.name, frozenset()))


def _size(process: Process) -> tuple[object, ...]:
    """Sort key: the controller first, then by decreasing size; ties keep their order."""
    first = process.kind != "controller"
    return (first, -process.gpus, -total(process.memory.gpu), -process.cores, -process.host_bytes)


def _on_what_is_left(placed: Placed, shared: tuple[int, ...]) -> Placed:
    """Restrict a process without exclusive cores to the cores without an owner."""
    if placed.process.cores:
        return placed
    return Placed(placed.process, placed.host, shared, placed.gpus, placed.gpu_bytes)


def _preferred(process: Process, capacities: Sequence[HostCapacity]) -> list[HostCapacity]:
    """Return the hosts in the order in which a process tries them."""
    if process.gpus:
        return sorted(capacities, key=lambda capacity: capacity.host.gpu_memory)
    if process.together or process.kind == "controller":
        return list(capacities)
    return sorted(capacities, key=lambda capacity: capacity.load)

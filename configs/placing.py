"""Which process comes to which host, cores and GPUs: a pure function of a run and its hosts.

    place(config, hosts, sizes) -> Placement         or CannotPlace, with the sum that shows why

Largest first, each to the first host that has room: the same run on the same hosts always comes out
the same. Not every combination is tried; where one exists that this does not find, naming hosts in
the config helps. Starts nothing and looks at no machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.memory import GB, total
from composer_mesh.configs.model_sizes import ModelSizes
from composer_mesh.configs.placement import PlacementConfig
from composer_mesh.configs.processes import Process, processes_of
from composer_mesh.configs.refusal import no_place
from composer_mesh.configs.room import Host, Placed, Room
from composer_mesh.configs.schema import Config


@dataclass(frozen=True)
class Placement:
    """Every process of a run, in the order in which the config names them, and its hosts."""

    hosts: tuple[Host, ...]
    placed: tuple[Placed, ...]

    def named(self, name: str) -> Placed | None:
        """Where the process of this name is; None where the placement has none."""
        return next((one for one in self.placed if one.process.name == name), None)

    def on(self, host: str) -> tuple[Placed, ...]:
        """The processes of one host."""
        return tuple(one for one in self.placed if one.host == host)


class CannotPlace(ConfigError):
    """A run that the hosts have no room for."""


def described_hosts(placement: PlacementConfig) -> tuple[Host, ...]:
    """The hosts that a config describes; empty where it describes none."""
    return tuple(
        Host(name, one.cores, int(one.memory_gb * GB), one.gpus, int(one.gpu_memory_gb * GB))
        for one in placement.hosts
        for name in one.names
    )


def place(config: Config, hosts: Sequence[Host], sizes: ModelSizes | None) -> Placement:
    """Where each process of a run is; raises `CannotPlace`, or `UnfitPlace` whatever the hosts.

    Without sizes the memory of models is left out.
    """
    aliases = {name: one.name for one in config.placement.hosts for name in one.names}
    return place_processes(processes_of(config, sizes), hosts, aliases)


def place_processes(
    processes: Sequence[Process], hosts: Sequence[Host], aliases: dict[str, str] | None = None
) -> Placement:
    """Where each process is; `aliases` are further names that hosts are known by."""
    rooms = [Room(host, (aliases or {}).get(host.name, host.name)) for host in hosts]
    places = range(len(processes))
    found: dict[int, Placed] = {}
    for index in sorted(places, key=lambda one: _size(processes[one])):
        process = processes[index]
        room = next((one for one in _preferred(process, rooms) if not one.why_not(process)), None)
        if room is None:
            raise CannotPlace(no_place(process, processes, rooms))
        found[index] = room.take(process)
    left = {room.host.name: room.shared_cores for room in rooms}
    return Placement(
        tuple(hosts),
        tuple(_on_what_is_left(found[index], left[found[index].host]) for index in places),
    )


def _size(process: Process) -> tuple[object, ...]:
    """The controller comes first, then the largest; equals stay in their order."""
    first = process.kind != "controller"
    return (first, -process.gpus, -total(process.memory.gpu), -process.cores, -process.host_bytes)


def _on_what_is_left(placed: Placed, shared: tuple[int, ...]) -> Placed:
    """Keep a process without cores of its own off those that others have for their own."""
    if placed.process.cores:
        return placed
    return Placed(placed.process, placed.host, shared, placed.gpus, placed.gpu_bytes)


def _preferred(process: Process, rooms: Sequence[Room]) -> list[Room]:
    """The rooms in the order in which a process tries them."""
    if process.gpus:
        return sorted(rooms, key=lambda room: room.host.gpu_memory)
    if process.together or process.kind == "controller":
        return list(rooms)
    return sorted(rooms, key=lambda room: room.load)

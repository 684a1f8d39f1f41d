"""Where the processes of a run are: the placement of a config on its hosts, and what each is told.

`placement_solver` decides. This module knows the hosts of the run, moves processes whose host is
lost, and builds the environment that tells a process its resources (`mesh.process_resources`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.machine import this_machine
from composer_mesh.mesh.process_resources import share_env
from composer_mesh.planning.host_capacity import HostResources, Placed
from composer_mesh.planning.host_checks import (
    WrongHost,
    about,
    check_described,
    check_found,
    check_has,
    check_together,
)
from composer_mesh.planning.model_sizes import UnknownSizes, sizes_of
from composer_mesh.planning.placement_solver import (
    Placement,
    aliases_of,
    described_hosts,
    place,
    place_again,
    stay_with_controller,
)
from composer_mesh.planning.process_specs import Process, processes_of

FOUND_LATER = (
    "the hosts of the run are found when it is launched: whether it fits is not known before; "
    "describe them in placement.hosts to check it"
)


class NoPlacement(Exception):
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
class ProcessPlacement:
    """A host by its name, None for the controller's own machine, and what a process is told."""

    host: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


PlacementOf = Callable[[int], ProcessPlacement]
"""The seat of the process with this number among those of its kind, for one start of it."""


@dataclass(frozen=True)
class ProcessPlacements:
    """The placement of one run; `notes` say where hosts come from and what is not in the sums.

    On several hosts a process keeps its seat while its host is there, also while it is away itself.
    """

    placement: Placement
    notes: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()
    """Kinds that stay on the controller's machine."""
    aliases: dict[str, frozenset[str]] = field(default_factory=dict)
    """Further names that the config calls a host by."""
    _hosts: dict[str, HostResources] = field(default_factory=dict)
    _lost: list[str] = field(default_factory=list)
    _taken: dict[tuple[str, int], Placed] = field(default_factory=dict)
    _known: dict[tuple[str, int], Process] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Config,
        hosts: Sequence[HostResources] | None = None,
        found: Callable[[], HostResources] = this_machine,
    ) -> "ProcessPlacements":
        """Place a run; `hosts` are those that are there, once that is known.

        Looks at this machine where a local run describes none. Raises `CannotPlace`, `UnfitPlace`
        or `WrongHost`. Memory of a model whose sizes nobody knows is left out of the sums, and that
        is said.
        """
        check_described(config)
        notes: list[str] = []
        sizes = _sizes(config, notes)
        those = _hosts_of(config, hosts, found, notes)
        staying, groups = stay_with_controller(config), aliases_of(config.placement)
        if not those:
            processes_of(config, sizes)  # what fits on no host is refused before any is known
            return cls(Placement((), ()), tuple(notes), staying)
        aliases = {
            host.name: groups.get(known, frozenset()) | {known} for known, host in those.items()
        }
        placement = place(config, tuple(those.values()), sizes, aliases)
        check_together(config, {one.host for one in placement.of_kind("trainer")})
        return cls(placement, tuple(notes), staying, aliases)

    def __post_init__(self) -> None:
        self._hosts.update((host.name, host) for host in self.placement.hosts)
        for kind in {one.process.kind for one in self.placement.placed}:
            for number, placed in enumerate(self.placement.of_kind(kind)):
                self._taken[kind, number] = placed
                self._known[kind, number] = placed.process

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that are there now."""
        return tuple(self._hosts)

    def take(self, kind: str, number: int = 0) -> ProcessPlacement:
        """The seat for a start of a process: its own, or one on a host that has room.

        Raises `NoCapacity` where none has, `NoPlacement` where a local run was placed without it.
        """
        if kind in self.staying:
            return ProcessPlacement(None, self.env(kind, number))
        placed = self._taken.get((kind, number))
        if placed is None:
            process = self._process(kind, number)
            there = tuple(self._hosts.values())
            placed = place_again(process, tuple(self._taken.values()), there, self.aliases)
            self._taken[kind, number] = placed
        return ProcessPlacement(placed.host, _env(placed))

    def taker(self, kind: str) -> PlacementOf:
        """`take` of one kind."""
        return lambda number: self.take(kind, number)

    def lose(self, host: str) -> None:
        """A host is gone, and with it the seats there; nothing happens where it was not there."""
        if self._hosts.pop(host, None) is None:
            return
        self._lost.append(host)
        for who, placed in list(self._taken.items()):
            if placed.host == host and who[0] not in self.staying:
                del self._taken[who]

    def join(self, host: HostResources) -> None:
        """A host is there from now on: for those that find no room on the others, or come anew.

        One whose name the config does not know has what was wanted of the first host that was lost.
        """
        if host.name in self._hosts:
            raise ValueError(f"host {host.name} is there already: call the new one otherwise")
        if host.name in self._lost:
            self._lost.remove(host.name)
        elif self._lost:
            lost = self._lost.pop(0)
            self.aliases[host.name] = frozenset({lost}) | self.aliases.get(lost, frozenset())
        self._hosts[host.name] = host

    def env(self, kind: str, number: int = 0) -> dict[str, str]:
        """What the process of this number is told, whichever of its place's processes it is.

        Processes beyond the placement share what others share; raises `NoPlacement` where the
        kind has no place at all.
        """
        placements = self.placement.of_kind(kind)
        if number >= len(placements) and (own := _own(placements[0].process)):
            raise NoPlacement(kind, number, own)
        return _env(placements[min(number, len(placements) - 1)])

    def _process(self, kind: str, number: int) -> Process:
        """A process of a kind, also one beyond the placement."""
        known = self._known.get((kind, number))
        if known is None:
            known = replace(self._known[kind, 0], name=f"{kind}-{number}")
        return known


def refuse_other_hosts(config: Config, found: Callable[[], HostResources] = this_machine) -> None:
    """Refuse to start what is described for other machines than this one; raises `WrongHost`.

    Of a run on workers that is known when they are there.
    """
    if config.cluster.remote:
        return
    described = described_hosts(config.placement)
    if len(described) > 1:
        raise WrongHost(
            f"placement.hosts describes {len(described)} hosts, but a run is started on this "
            "machine alone while cluster.kind is 'local': describe one host or none, or say where "
            "the hosts are with cluster.kind"
        )
    for host in described:
        check_has(host, found(), "this machine", "start the run there")


def _hosts_of(
    config: Config,
    hosts: Sequence[HostResources] | None,
    found: Callable[[], HostResources],
    notes: list[str],
) -> dict[str, HostResources]:
    """The hosts to place a run on, by the config's names; empty where they are not known yet."""
    if config.cluster.remote and hosts is not None:
        return check_found(config, hosts)
    if described := described_hosts(config.placement):
        return {host.name: host for host in described}
    if config.cluster.remote:
        notes.append(FOUND_LATER)
        return {}
    here = found()
    notes.append(f"found {about(here)}; describe hosts to check for others")
    return {here.name: here}


def _sizes(config: Config, notes: list[str]) -> ModelSizes | None:
    if (folder := config.policy.path) is not None and not folder.is_dir():
        notes.append(f"{folder} is not there: its sizes are policy.sizes, nothing else checked")
    try:
        return sizes_of(config.policy)
    except UnknownSizes as unknown:
        notes.append(f"memory of models is not in these sums: {unknown}")
        return None


def _own(process: Process) -> str:
    return "a GPU" if process.gpus else "cores" if process.cores else ""


def _env(placed: Placed) -> dict[str, str]:
    threads = placed.process.threads
    return share_env(threads, placed.cores, placed.gpus, placed.gpu_share)

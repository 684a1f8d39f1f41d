"""Placement of a run's processes on its hosts, and the environment of each process.

`placement_solver` places them. This module tracks the hosts of the run, moves processes whose host
is lost, and builds the environment variables with a process's resources (`mesh.process_resources`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.configs.worded import Worded
from composer_mesh.mesh.machine import this_machine
from composer_mesh.mesh.process_resources import share_env
from composer_mesh.planning.host_capacity import HostResources, Placed, Process, processes_of
from composer_mesh.planning.model_sizes import UnknownSizes, sizes_of, teacher_sizes_of
from composer_mesh.planning.placement_solver import (
    Placement,
    WrongHost,
    about,
    aliases_of,
    by_turns,
    check_described,
    check_found,
    check_has,
    check_together,
    crowded,
    described_hosts,
    place,
    place_again,
    place_in_memory,
    stay_with_controller,
)

FOUND_LATER = (
    "the hosts of the run are found when it is launched: whether it fits is not known before; "
    "describe them in placement.hosts to check it"
)

BACKEND_COUNTED = (
    "the trainer's memory is counted as for trainer.optimizer on all weights, or on trainer.lora's "
    "adapters: {} may take more or less"
)


CHECKPOINTED = (
    "trainer.activation_checkpointing is 'auto' and on: without it, {}; steps take about a third "
    "longer; set it to false or true to decide it yourself"
)


NO_GPU_SHARED = (
    "placement.colocate is true but no process has a GPU: they take turns with the host's own "
    "memory, which frees caches and gradients alone; give them placement.KIND.gpus"
)


class NoPlacement(Worded, Exception):
    """A process beyond the placement needs dedicated cores or GPUs: its kind and number."""

    message = (
        "{0}-{1} needs {2} of its own, and the run was placed without it: set the number of {0} "
        "processes in the config, where it is part of the placement"
    )


@dataclass(frozen=True)
class ProcessPlacement:
    """A process's host (None for the controller's machine) and its environment variables."""

    host: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


PlacementOf = Callable[[int], ProcessPlacement]
"""Returns the placement of process number N of its kind, for one start of it."""


@dataclass(frozen=True)
class ProcessPlacements:
    """The placement of one run; `notes` describe how hosts were found and what the sums omit.

    On several hosts a process keeps its placement while its host is attached, also while it is
    down.
    """

    placement: Placement
    notes: tuple[str, ...] = ()
    staying: tuple[str, ...] = ()
    """Kinds that stay on the controller's machine."""
    aliases: dict[str, frozenset[str]] = field(default_factory=dict)
    """Further names that the config uses for a host."""
    recomputes: bool = False
    """Whether activation checkpointing that is "auto" is on."""
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
        """Place a run; `hosts` are the attached ones, once they are known.

        Inspects this machine if a local run describes no hosts. Raises `CannotPlace`,
        `UnfitPlace` or `WrongHost`. Memory of a model of unknown size is left out of the sums, with
        a note.
        """
        check_described(config)
        notes: list[str] = []
        sizes, teacher = _sizes(config, notes), _teacher_sizes(config, notes)
        if (backend := config.trainer.backend) is not None:
            notes.append(BACKEND_COUNTED.format(backend.import_path))
        those = _hosts_of(config, hosts, found, notes)
        staying, groups = stay_with_controller(config), aliases_of(config.placement)
        if not those:
            # raises for processes that fit on no host, before any host is known
            processes_of(config, sizes, teacher)
            return cls(Placement((), ()), tuple(notes), staying)
        aliases = {
            host.name: groups.get(known, frozenset()) | {known} for known, host in those.items()
        }
        there = tuple(those.values())
        placement, short = place_in_memory(
            config, lambda one: place(one, there, sizes, aliases, teacher)
        )
        if short is not None:
            notes.append(CHECKPOINTED.format(str(short).splitlines()[0].rstrip(":")))
        notes += [*crowded(placement), *by_turns(placement)]
        if config.placement.colocate and not any(one.gpus for one in placement.placed):
            notes.append(NO_GPU_SHARED)
        check_together(config, {one.host for one in placement.of_kind("trainer")})
        return cls(placement, tuple(notes), staying, aliases, short is not None)

    def __post_init__(self) -> None:
        self._hosts.update((host.name, host) for host in self.placement.hosts)
        for kind in {one.process.kind for one in self.placement.placed}:
            for number, placed in enumerate(self.placement.of_kind(kind)):
                self._taken[kind, number] = placed
                self._known[kind, number] = placed.process

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that are attached now."""
        return tuple(self._hosts)

    def take(self, kind: str, number: int = 0) -> ProcessPlacement:
        """Return the placement for a process start: its own, or a new one on a host with capacity.

        Raises `NoCapacity` if no host has any, `NoPlacement` if a local run was placed
        without it.
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
        """Return `take` for one kind."""
        return lambda number: self.take(kind, number)

    def lose(self, host: str) -> None:
        """Remove a lost host and the placements on it; does nothing for an unknown host."""
        if self._hosts.pop(host, None) is None:
            return
        self._lost.append(host)
        for who, placed in list(self._taken.items()):
            if placed.host == host and who[0] not in self.staying:
                del self._taken[who]

    def join(self, host: HostResources) -> None:
        """Add a host, for processes that need a new placement.

        If the config does not know its name, it takes over the constraints of the first lost host.
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
        """Return the environment variables of a process, whichever restart of it this is.

        Processes beyond the placement share the resources of the last placed one; raises
        `NoPlacement` if the kind needs dedicated ones.
        """
        placements = self.placement.of_kind(kind)
        if number >= len(placements) and (own := _own(placements[0].process)):
            raise NoPlacement(kind, number, own)
        return _env(placements[min(number, len(placements) - 1)])

    def _process(self, kind: str, number: int) -> Process:
        """Return a process of a kind, also one beyond the placement."""
        known = self._known.get((kind, number))
        if known is None:
            known = replace(self._known[kind, 0], name=f"{kind}-{number}")
        return known


def refuse_other_hosts(config: Config, found: Callable[[], HostResources] = this_machine) -> None:
    """Refuse a local run that is described for other machines; raises `WrongHost`.

    The hosts of a remote run are checked when they are attached.
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
    """Return the hosts to place a run on, by the config's names; empty if not known yet."""
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
    if (folder := config.policy.folder) is not None:
        _note_missing(folder, "policy", notes)
    try:
        return sizes_of(config.policy)
    except UnknownSizes as unknown:
        notes.append(f"memory of models is not in these sums: {unknown}")
        return None


def _teacher_sizes(config: Config, notes: list[str]) -> ModelSizes | None:
    """Return the sizes of an SDPO teacher that is another model."""
    other = config.sdpo.teacher_model
    if other is None or not config.sdpo.on:
        return None
    _note_missing(other.folder, "sdpo.teacher_model", notes)
    try:
        return teacher_sizes_of(other)
    except UnknownSizes as unknown:
        notes.append(f"memory of the SDPO teacher's model is not in these sums: {unknown}")
        return None


def _note_missing(folder: Path, section: str, notes: list[str]) -> None:
    if not folder.is_dir():
        notes.append(f"{folder} is not there: its sizes are {section}.sizes, nothing else checked")


def _own(process: Process) -> str:
    return "a GPU" if process.gpus else "cores" if process.cores else ""


def _env(placed: Placed) -> dict[str, str]:
    threads = placed.process.threads
    return share_env(threads, placed.cores, placed.gpus, placed.gpu_share)

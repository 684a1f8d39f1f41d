"""Assigns processes to hosts, cores and GPUs: a pure function of a run and its hosts.

    place(config, hosts, sizes) -> Placement         or CannotPlace, with the sums
    place_again(process, placed, hosts) -> Placed    next to placed processes; or NoCapacity

First-fit decreasing: the largest process first, each on the first host that it fits, so placement
is deterministic. Not every combination is tried; if a possible one is not found, naming hosts in
the config helps.

Errors of placement: why a process fits on no host, the sums, and a repair.

Checks of the hosts that a config describes, against the config and the hosts found.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.placement import KINDS, PlacementConfig
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.schema import Config
from composer_mesh.planning.host_capacity import (
    WHOLE,
    HostCapacity,
    HostResources,
    Placed,
    Process,
    UnfitPlace,
    processes_of,
    threads_key,
)
from composer_mesh.planning.memory import GB, SHARED_CODE, in_gb, in_words, total
from composer_mesh.planning.memory_estimate import PARKED


class CannotPlace(ConfigError):
    """A run does not fit on its hosts."""


class NoCapacity(Exception):
    """A process fits on none of the run's current hosts; the reason in one line."""

    failure_class = "infrastructure"


def cannot_place(
    process: Process, processes: Sequence[Process], capacities: Sequence[HostCapacity]
) -> str:
    """Return every host's reason, the sums and a repair."""
    lines = [f"{process.name} fits on no host:"]
    lines += [f"  {capacity.host.name} {capacity.why_not(process)}" for capacity in capacities]
    lines += _sums(process, processes, [capacity.host for capacity in capacities])
    return "\n  ".join([*lines, f"repair: {_repair(process, capacities)}"])


def no_capacity(process: Process, capacities: Sequence[HostCapacity]) -> str:
    """Return every host's reason in one line."""
    have = "; ".join(f"{capacity.host.name} {capacity.why_not(process)}" for capacity in capacities)
    wanted = [f"{process.gpus / WHOLE:g} GPU"] if process.gpus else []
    wanted += [f"{process.cores} cores"] if process.cores else []
    wanted += [f"{in_gb(process.host_bytes)} GB of memory"]
    return (
        f"no host has room for {process.name}, which needs {' and '.join(wanted)}: "
        f"{have or 'no host is left'}; let another host join, or run fewer processes"
    )


def _sums(
    process: Process, processes: Sequence[Process], hosts: Sequence[HostResources]
) -> Iterator[str]:
    """Yield the total resources of all processes, and the needs of this one."""
    yield f"{process.name} needs of its host: {in_words(process.memory.host)}"
    if process.gpus:
        yield f"{process.name} needs of each GPU: {in_words(process.memory.gpu)}"
        turn = [one for one in processes if one.turn == process.turn]
        what = f"GPUs in the turn of {process.turn}" if process.turn else "GPUs"
        yield _sum(what, turn, lambda one: one.gpus / WHOLE, sum(h.gpus for h in hosts))
    if any(one.cores for one in processes):
        yield _sum("own cores", processes, lambda one: one.cores, sum(h.cores for h in hosts))
    memory = sum(host.memory - SHARED_CODE for host in hosts) / GB
    sum_of_memory = _sum("GB of memory", processes, lambda one: one.host_bytes / GB, memory)
    yield f"{sum_of_memory}, after {in_gb(SHARED_CODE)} of each host for shared libraries"


def _sum(
    what: str, processes: Sequence[Process], ask: Callable[[Process], float], have: float
) -> str:
    terms = []
    for (kind, amount), group in groupby(processes, key=lambda one: (one.kind, ask(one))):
        count = len(list(group))
        if amount:
            times = f"{count} x " if count > 1 else ""
            terms.append(f"{kind} {times}{_figure(amount)}")
    return (
        f"all {what}: {' + '.join(terms)} = {_figure(sum(map(ask, processes)))}, of {_figure(have)}"
    )


def _repair(process: Process, capacities: Sequence[HostCapacity]) -> str:
    key = f"placement.{process.kind}"
    if process.gpus and any("GB needed" in capacity.why_not(process) for capacity in capacities):
        more = f", or raise {key}.gpus" if process.gpus < WHOLE else ""
        return process.relief + more
    if process.gpus:
        return f"lower {key}.gpus, run fewer processes with GPUs, or describe more hosts"
    if any("cores" in capacity.why_not(process) for capacity in capacities):
        return f"lower {key}.cores, or set it to 0 to share the rest"
    return "run fewer processes, a smaller model, or describe hosts with more memory"


def _figure(value: float) -> str:
    return f"{value:g}" if value == int(value) else f"{value:.2f}"


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


def place_in_memory(
    config: Config, make: Callable[[Config], Placement]
) -> tuple[Placement, CannotPlace | UnfitPlace | None]:
    """Return what `make` places; raises as it does.

    Where activation checkpointing is "auto", it is on only if the run cannot be placed otherwise:
    then the second is the reason.
    """
    try:
        return make(config), None
    except (CannotPlace, UnfitPlace) as refused:
        recomputing = with_checkpointing(config, True)
        if recomputing == config:
            raise
        return make(recomputing), refused


def with_checkpointing(config: Config, on: bool) -> Config:
    """Return a config whose activation checkpointing is decided, if it was "auto"."""
    if config.trainer.activation_checkpointing != "auto":
        return config
    trainer = config.trainer.model_copy(update={"activation_checkpointing": on})
    return config.model_copy(update={"trainer": trainer})


def crowded(placement: Placement) -> Iterator[str]:
    """Yield a warning for each host whose models compute with teams of more threads than cores.

    Processes of one thread share cores by taking turns; a team waits for its slowest thread.
    """
    for host in placement.hosts:
        computing = [one.process for one in placement.on(host.name) if one.process.kind in _COMPUTE]
        threads = sum(one.threads for one in computing)
        if threads <= host.cores or all(one.threads == 1 for one in computing):
            continue
        groups = [(kind, list(group)) for kind, group in groupby(computing, lambda one: one.kind)]
        terms = [f"{kind} {len(group)} x {group[0].threads}" for kind, group in groups]
        keys = [threads_key(kind) for kind, group in groups if group[0].threads > 1]
        yield (
            f"{host.name} has {host.cores} cores but its models compute with {threads} threads "
            f"({' + '.join(terms)}), which wait for each other: lower {' or '.join(keys)}"
        )


def by_turns(placement: Placement) -> Iterator[str]:
    """Yield what each turn of a colocated run takes of a host's GPUs, and what is pinned for it."""
    for host in placement.hosts:
        placed = [one for one in placement.on(host.name) if one.process.turn and one.gpus]
        if not placed:
            continue
        turns = groupby(sorted(placed, key=_turn), _turn)
        sums = [
            (turn, sum(one.gpu_bytes * len(one.gpus) for one in group)) for turn, group in turns
        ]
        parts = [part for one in placed for part in one.process.memory.host if part.what == PARKED]
        yield (
            f"{host.name} shares its GPUs in turns: "
            f"{', '.join(f'{turn} {in_gb(taken)} GB' for turn, taken in sums)}; "
            f"{in_gb(total(parts))} GB of its memory are pinned for processes that sleep"
        )


def _turn(placed: Placed) -> str:
    return placed.process.turn


_COMPUTE = ("trainer", "generator", "sdpo_teacher", "reference")


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


SLACK = 0.98
"""A kernel reports slightly less memory than a machine nominally has."""


class WrongHost(ConfigError):
    """The hosts that a config describes do not match those of the run."""


def check_described(config: Config) -> None:
    """Refuse a remote run whose config lacks needed host descriptions; raises `WrongHost`."""
    cluster, described = config.cluster, described_hosts(config.placement)
    if not cluster.remote:
        return
    if cluster.kind != "hosts" and not described:
        raise WrongHost(
            f"placement.hosts describes no host but cluster.kind is {cluster.kind!r}, from "
            "which hosts of these sizes are requested: write [[placement.hosts]] with count, "
            "cores and memory_gb"
        )
    if described and cluster.workers and len(described) != len(cluster.workers):
        raise WrongHost(
            f"placement.hosts describes {len(described)} hosts but cluster.workers has "
            f"{len(cluster.workers)} addresses, and each host has one worker: describe each of "
            "them, or none"
        )
    _check_staying(config)


def _check_staying(config: Config) -> None:
    """Refuse hosts or cores for processes that stay on the controller's machine."""
    for kind in stay_with_controller(config):
        place, key = config.placement.of(kind), f"placement.{kind}"
        if place.hosts:
            raise WrongHost(
                f"{key}.hosts names {place.hosts[0]!r} but this process stays on the controller's "
                f"machine: remove {key}.hosts"
            )
        if place.cores and config.cluster.kind != "slurm":
            raise WrongHost(
                f"{key}.cores is {place.cores} but this process stays on the controller's "
                f"machine, which placement.hosts does not describe: remove {key}.cores"
            )


def check_found(config: Config, found: Sequence[HostResources]) -> dict[str, HostResources]:
    """Match found hosts to the config's names for them; raises `WrongHost`.

    The described resources are what the run may use, even if a host has more. Hosts are matched by
    name, and the others by their resources, the largest first. The result does not depend on the
    order of `found`.
    """
    described = described_hosts(config.placement)
    if not described:
        ordered = sorted(found, key=lambda host: (len(host.name), host.name))  # 2 before 10
        return {host.name: host for host in ordered}
    if len(found) != len(described):
        raise WrongHost(
            f"placement.hosts describes {len(described)} hosts, but there are {len(found)} "
            f"({', '.join(host.name for host in found) or 'none'}): start one worker for each"
        )
    left = {host.name: host for host in found}
    pairs = {one.name: (one, left.pop(one.name)) for one in described if one.name in left}
    for one in sorted(described, key=_resource_size, reverse=True):
        if one.name not in pairs:
            fitting = (host for host in left.values() if _has(host, one))
            host = next(fitting, next(iter(left.values())))
            pairs[one.name] = one, left.pop(host.name)
    for one, host in pairs.values():
        check_has(one, host, "what is there", "start its worker on such a host")
    return {one.name: replace(one, name=pairs[one.name][1].name) for one in described}


def check_has(described: HostResources, here: HostResources, who: str, repair: str) -> None:
    """Refuse a host with fewer resources than described; raises `WrongHost`."""
    if not _has(here, described):
        raise WrongHost(
            f"placement.hosts describes {about(described)}, but {who} is {about(here)}: "
            f"{repair}, or correct placement.hosts"
        )


def check_together(config: Config, hosts: Collection[str | None]) -> None:
    """Refuse trainer ranks on several hosts that are connected only through ssh tunnels."""
    ssh = config.cluster.ssh
    if ssh is not None and ssh.tunnel and len(set(hosts)) > 1:
        raise WrongHost(
            f"the trainer's ranks are on {len(set(hosts))} hosts but cluster.ssh.tunnel is true, "
            "and their traffic uses no tunnel: set placement.trainer.hosts to "
            "one host, or cluster.ssh.tunnel to false"
        )


def about(host: HostResources) -> str:
    """Describe a host: `localhost: 2 cores, 23.5 GB, no GPU`."""
    gpus = f"{host.gpus} GPUs of {in_gb(host.gpu_memory)} GB" if host.gpus else "no GPU"
    return f"{host.name}: {host.cores} cores, {in_gb(host.memory)} GB, {gpus}"


def _resource_size(host: HostResources) -> tuple[int, ...]:
    return (host.gpus, host.gpu_memory, host.memory, host.cores)


def _has(host: HostResources, described: HostResources) -> bool:
    return (
        host.cores >= described.cores
        and host.gpus >= described.gpus
        and host.memory >= described.memory * SLACK
        and host.gpu_memory >= described.gpu_memory * SLACK
    )

"""Errors of placement: why a process fits on no host, the sums, and a repair."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from composer_mesh.configs.errors import ConfigError
from composer_mesh.planning.host_capacity import HostCapacity, HostResources
from composer_mesh.planning.memory import GB, SHARED_CODE, in_gb, in_words
from composer_mesh.planning.process_specs import WHOLE, Process


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
        yield _sum("GPUs", processes, lambda one: one.gpus / WHOLE, sum(h.gpus for h in hosts))
    if any(one.cores for one in processes):
        yield _sum("own cores", processes, lambda one: one.cores, sum(h.cores for h in hosts))
    memory = sum(host.memory - SHARED_CODE for host in hosts) / GB
    sum_of_memory = _sum("GB of memory", processes, lambda one: one.host_bytes / GB, memory)
    yield f"{sum_of_memory}, after {in_gb(SHARED_CODE)} of each host for shared libraries"


def _sum(
    what: str, processes: Sequence[Process], ask: Callable[[Process], float], have: float
) -> str:
    terms = []
    for (kind, asked), group in groupby(processes, key=lambda one: (one.kind, ask(one))):
        count = len(list(group))
        if asked:
            times = f"{count} x " if count > 1 else ""
            terms.append(f"{kind} {times}{_figure(asked)}")
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
        return f"lower {key}.cores, or set it to 0 to share what is left"
    return "run fewer processes, a smaller model, or describe hosts with more memory"


def _figure(value: float) -> str:
    return f"{value:g}" if value == int(value) else f"{value:.2f}"

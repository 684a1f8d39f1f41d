"""What a config must say of its hosts before a run on several of them can begin.

Which hosts there really are is found by the mesh; what fits where, by `placement_solver`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.schema import Config
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.memory import in_gb
from composer_mesh.planning.placement_solver import described_hosts, stay_with_controller

SLACK = 0.98
"""What a kernel leaves of a machine's memory is a little less than what its owner counts."""


class WrongHost(ConfigError):
    """The hosts that a config describes are not those that the run has."""


def check_described(config: Config) -> None:
    """Refuse a remote run that does not say what is needed of its hosts; raises `WrongHost`."""
    cluster, described = config.cluster, described_hosts(config.placement)
    if not cluster.remote:
        return
    if cluster.kind != "hosts" and not described:
        raise WrongHost(
            f"placement.hosts describes no host but cluster.kind is {cluster.kind!r}, which is "
            "asked for hosts of these sizes: write [[placement.hosts]] with count, cores and "
            "memory_gb"
        )
    if described and cluster.workers and len(described) != len(cluster.workers):
        raise WrongHost(
            f"placement.hosts describes {len(described)} hosts but cluster.workers has "
            f"{len(cluster.workers)} addresses, and each host has one worker: describe each of "
            "them, or none"
        )
    _check_staying(config)


def _check_staying(config: Config) -> None:
    """Who stays on the controller's machine has none of the hosts, and nothing of its own there."""
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
    """The hosts that are there, by the names that the config has for them; raises `WrongHost`.

    What is described is what the run may use, also of a host that has more. A host is known by its
    name; those with other names are told by their figures, the largest first. In whatever order
    hosts were found, the result has one of its own.
    """
    described = described_hosts(config.placement)
    if not described:
        ordered = sorted(found, key=lambda host: (len(host.name), host.name))  # 2 before 10
        return {host.name: host for host in ordered}
    if len(found) != len(described):
        raise WrongHost(
            f"placement.hosts describes {len(described)} hosts, but there are {len(found)} "
            f"({', '.join(host.name for host in found) or 'none'}): have one worker for each"
        )
    left = {host.name: host for host in found}
    pairs = {one.name: (one, left.pop(one.name)) for one in described if one.name in left}
    for one in sorted(described, key=_size, reverse=True):
        if one.name not in pairs:
            fitting = (host for host in left.values() if _has(host, one))
            host = next(fitting, next(iter(left.values())))
            pairs[one.name] = one, left.pop(host.name)
    for one, host in pairs.values():
        check_has(one, host, "what is there", "have its worker on such a host")
    return {one.name: replace(one, name=pairs[one.name][1].name) for one in described}


def check_has(described: HostResources, here: HostResources, who: str, repair: str) -> None:
    """Refuse a host with less than is said of it; raises `WrongHost`."""
    if not _has(here, described):
        raise WrongHost(
            f"placement.hosts describes {about(described)}, but {who} is {about(here)}: "
            f"{repair}, or correct placement.hosts"
        )


def check_together(config: Config, hosts: Collection[str | None]) -> None:
    """Refuse ranks of the trainer on several hosts where these reach each other by ssh alone."""
    ssh = config.cluster.ssh
    if ssh is not None and ssh.tunnel and len(set(hosts)) > 1:
        raise WrongHost(
            f"the trainer's ranks are on {len(set(hosts))} hosts but cluster.ssh.tunnel is true, "
            "and what they send each other goes through no tunnel: set placement.trainer.hosts to "
            "one host, or cluster.ssh.tunnel to false"
        )


def about(host: HostResources) -> str:
    """`localhost: 2 cores, 23.5 GB, no GPU`."""
    gpus = f"{host.gpus} GPUs of {in_gb(host.gpu_memory)} GB" if host.gpus else "no GPU"
    return f"{host.name}: {host.cores} cores, {in_gb(host.memory)} GB, {gpus}"


def _size(host: HostResources) -> tuple[int, ...]:
    return (host.gpus, host.gpu_memory, host.memory, host.cores)


def _has(host: HostResources, described: HostResources) -> bool:
    return (
        host.cores >= described.cores
        and host.gpus >= described.gpus
        and host.memory >= described.memory * SLACK
        and host.gpu_memory >= described.gpu_memory * SLACK
    )

"""Checks of the hosts that a config describes, against the config and the hosts found."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.schema import Config
from composer_mesh.planning.host_capacity import HostResources
from composer_mesh.planning.memory import in_gb
from composer_mesh.planning.placement_solver import described_hosts, stay_with_controller

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
            "and what they send each other goes through no tunnel: set placement.trainer.hosts to "
            "one host, or cluster.ssh.tunnel to false"
        )


def about(host: HostResources) -> str:
    """Describe a host: `localhost: 2 cores, 23.5 GB, no GPU`."""
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

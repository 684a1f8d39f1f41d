"""The workers of a run at given addresses: how each is started, and with which command.

A worker on loopback is a process of this machine. The others are started by ssh if that is
configured, and must be running already otherwise.

SSH tunnels between hosts whose ports are all bound to loopback.

The controller's machine runs one ssh to each host. Every worker has the same address on all
machines, 127.0.0.1 and its own port; connections between two hosts pass through the controller's
machine. Builds the commands only; it starts no ssh.

Common parts of all launchers: the config file, and the controller and worker commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path, PurePath

from composer_mesh.configs.cluster import SshConfig
from composer_mesh.configs.load import dump_toml
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.hosts import address as addresses
from composer_mesh.mesh.hosts.certificates import PRIVATE
from composer_mesh.mesh.hosts.roster import ROSTER
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.services.checks.keys import all_key_variables
from composer_mesh.services.launch.ports import LaunchRefused, Order, Plan

FOLDER, CONFIG_FILE = "launch", "config.toml"
AUTHORITY = ".tls"


def config_file(run: Path) -> Path:
    """Path of the resolved config that a launched run starts with."""
    return run / FOLDER / CONFIG_FILE


def log_file(run: Path) -> Path:
    """Path of the controller's output, for launchers without a log of their own."""
    return run / FOLDER / "controller.log"


def controller_command(
    python: str, run: PurePath, *how: str, config: PurePath | None = None
) -> list[str]:
    """Return the controller's command; `how` is --resume, --auto-resume, or nothing."""
    file = run / FOLDER / CONFIG_FILE if config is None else config
    return python_module(
        "composer_mesh", "train", str(file), "--output", str(run), *how, python=python
    )


def worker_command(
    python: str,
    config: Config,
    roster: PurePath,
    authority: PurePath | None,
    *where: str,
    wait_s: float | None = None,
) -> list[str]:
    """Return a worker's command; `where` has its name and address. Without TLS, no authority.

    The run's API keys may be in the environment that launches it. A worker and what it starts do
    not inherit them: the controller sends them to the actors that use them.
    """
    cluster = config.cluster
    without = [word for name in all_key_variables(config) for word in ("-u", name)]
    words = ["env", *without] if without else []
    words += python_module(
        "composer_mesh", "worker", *where, "--roster", str(roster), python=python
    )
    if authority is not None:
        words += ["--authority", str(authority)]
    wait_s = cluster.attach_s if wait_s is None else wait_s
    words += ["--lease", f"{cluster.lease_s:g}", "--wait", f"{wait_s:g}"]
    for subnet in cluster.subnets:
        words += ["--subnet", subnet]
    return words


def authority_of(order: Order) -> Path:
    """Return the folder of the certificate authority that the hosts of a run trust."""
    return order.config.cluster.authority or order.output / AUTHORITY


def with_config(order: Order, plan: Plan) -> Plan:
    """Return a plan with the common config file before its own files."""
    files = {config_file(order.output): dump_toml(order.config), **plan.files}
    return Plan(files, plan.commands, plan.secret)


def write_files(plan: Plan) -> None:
    """Write a plan's files, each atomically; secret ones are readable by their owner only."""
    for path, text in plan.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), PRIVATE if path in plan.secret else 0o666)


def renamed_log(log: Path) -> None:
    """Rename an earlier log to a numbered name, so that a new one can be written."""
    if not log.exists():
        return
    number = 1
    while (place := log.with_name(f"{log.stem}.{number}{log.suffix}")).exists():
        number += 1
    log.rename(place)


LOOPBACK = "127.0.0.1"
PATIENCE = (
    "BatchMode=yes",  # never prompts for a password
    "ExitOnForwardFailure=yes",  # a port in use ends ssh, instead of a tunnel without it
    "ConnectTimeout=15",
    "ServerAliveInterval=5",  # a broken connection is detected after 15 s
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a shared connection would hold the ports after this ssh has ended
    "ControlPath=none",
    "ForwardAgent=no",
    "ForwardX11=no",
    "PermitLocalCommand=no",
)


@dataclass(frozen=True)
class Tunnel:
    """One ssh process, which runs on the controller's machine during the run."""

    destination: str
    command: tuple[str, ...]


def tunnels(
    destinations: Sequence[str], ports: Sequence[int], controller_port: int, options: Sequence[str]
) -> tuple[Tunnel, ...]:
    """Return the tunnels of hosts, in order; `ports` has one worker port per destination.

    `options` are further arguments of ssh, placed first. Raises `LaunchRefused`.
    """
    every = [*ports, controller_port]
    _check(destinations, every)
    return tuple(
        Tunnel(destination, _ssh(destination, port, [one for one in every if one != port], options))
        for destination, port in zip(destinations, ports, strict=True)
    )


def _ssh(
    destination: str, port: int, back: Sequence[int], options: Sequence[str]
) -> tuple[str, ...]:
    """Return the command that forwards the host's worker port here, and every other port there."""
    patience = [part for option in PATIENCE for part in ("-o", option)]
    forwards = ["-L", _forward(port)]
    for other in back:
        forwards += ["-R", _forward(other)]
    return ("ssh", "-N", "-T", *options, *patience, *forwards, "--", destination)


def _forward(port: int) -> str:
    return f"{LOOPBACK}:{port}:{LOOPBACK}:{port}"


def _check(destinations: Sequence[str], ports: Sequence[int]) -> None:
    for destination in destinations:
        if destinations.count(destination) > 1:
            raise LaunchRefused(
                f"{destination} is the destination of {destinations.count(destination)} hosts, and "
                "one tunnel would take the ports of the other: describe one host for each machine"
            )
    for port in ports:
        if not 1 <= port <= 65535:
            raise LaunchRefused(
                f"port {port} cannot be tunnelled: write a fixed one from 1 to 65535 in "
                "cluster.workers and cluster.address"
            )
        if ports.count(port) > 1:
            raise LaunchRefused(
                f"port {port} is there {ports.count(port)} times, and through tunnels all workers "
                f"and the controller have one address, {LOOPBACK}: give each a port of its own in "
                "cluster.workers and cluster.address, such as 22301, 22302 and so on"
            )


CONTROLLER = "CONTROLLER"
"""Placeholder for the controller's process id, which is known once it has been started."""


@dataclass(frozen=True)
class WorkerCommand:
    """One host of a run; `destination` is its ssh destination, empty if no ssh is needed.

    `tunnel` is the ssh command that tunnels its port and runs it, without the remote command; empty
    without a tunnel. One that is `expected` is started by the user.
    """

    name: str
    address: str
    destination: str = ""
    expected: bool = False
    tunnel: tuple[str, ...] = ()

    def command(self, order: Order) -> list[str]:
        """Return the command that runs on the host."""
        authority = authority_of(order) if addresses.split(self.address)[0] == "tls" else None
        where = ("--listen", self.address, "--name", self.name)
        roster = order.output / ROSTER
        words = worker_command(order.python, order.config, roster, authority, *where)
        if not self.destination and not self.expected:
            words += ["--with-process", CONTROLLER]
        return words

    def log(self, order: Order) -> Path:
        """Return the path of its log."""
        return order.output / FOLDER / f"worker-{self.name}.log"


def workers_of(order: Order) -> list[WorkerCommand]:
    """Return the workers in the order of `cluster.workers`; raises `LaunchRefused`."""
    cluster = order.config.cluster
    if not cluster.workers:
        return []
    names = [host.name for host in order.hosts] or [
        f"host-{n}" for n in range(len(cluster.workers))
    ]
    _check_ports(cluster.workers)
    pairs = list(zip(names, cluster.workers, strict=True))
    if cluster.ssh is None:
        return [WorkerCommand(name, one, expected=not _on_loopback(one)) for name, one in pairs]
    destinations = _destinations(cluster.ssh, cluster.workers)
    if cluster.ssh.tunnel:
        return list(_tunnelled(order, pairs, destinations))
    return [
        WorkerCommand(name, one, "" if is_here(one) else destination)
        for (name, one), destination in zip(pairs, destinations, strict=True)
    ]


def is_here(address: str) -> bool:
    """Whether an address belongs to this machine, tested by binding to it."""
    try:
        addresses.free_port(addresses.split(address)[1])
    except addresses.BadAddress:
        return False
    return True


def _tunnelled(
    order: Order, pairs: Sequence[tuple[str, str]], destinations: Sequence[str]
) -> Iterator[WorkerCommand]:
    cluster = order.config.cluster
    assert cluster.ssh is not None
    if cluster.address is None:
        raise LaunchRefused(
            "cluster.ssh.tunnel is true but cluster.address is not set, and hosts must know by "
            'which port they reach the controller: set it, such as "tls://127.0.0.1:22300"'
        )
    for address in (*cluster.workers, cluster.address):
        if not _on_loopback(address):
            raise LaunchRefused(
                f"cluster.ssh.tunnel is true but {address} is not on loopback, so it would be "
                "reached without the tunnel: write 127.0.0.1 with a port of its own for each"
            )
    ports = [addresses.split(address)[2] for address in cluster.workers]
    own = addresses.split(cluster.address)[2]
    made = tunnels(destinations, ports, own, cluster.ssh.options)
    for (name, address), tunnel in zip(pairs, made, strict=True):
        # The worker runs in its tunnel's ssh session, so neither outlives the other.
        command = tuple(word for word in tunnel.command if word != "-N")
        yield WorkerCommand(name, address, tunnel.destination, tunnel=command)


def _destinations(ssh: SshConfig, workers: Sequence[str]) -> list[str]:
    if not ssh.destinations and ssh.tunnel:
        raise LaunchRefused(
            "cluster.ssh.tunnel is true but cluster.ssh.destinations is empty, and loopback "
            "addresses do not say which host is meant: name what ssh calls each host"
        )
    if not ssh.destinations:
        return [addresses.split(address)[1] for address in workers]
    if len(ssh.destinations) != len(workers):
        raise LaunchRefused(
            f"cluster.ssh.destinations has {len(ssh.destinations)} hosts but cluster.workers has "
            f"{len(workers)} addresses: name one for each, in their order"
        )
    for destination in ssh.destinations:
        if destination.startswith("-") or not destination.strip():
            raise LaunchRefused(
                f"cluster.ssh.destinations has {destination!r}, which ssh would not take for a "
                "host: write a host, user@host or an alias of your ssh config"
            )
    return list(ssh.destinations)


def _on_loopback(address: str) -> bool:
    _, host, _ = addresses.split(address)
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ports(workers: Sequence[str]) -> None:
    for address in workers:
        if addresses.split(address)[2] == 0:
            raise LaunchRefused(
                f"cluster.workers has {address}, but nobody would know which port that is: write "
                "a fixed one, such as 22300"
            )

"""What a launch would do: its files and commands, and the processes that the run then starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import SETTINGS
from composer_mesh.mesh.hosts.address import IFNAMES, channel_of
from composer_mesh.mesh.process_resources import VISIBLE
from composer_mesh.planning.host_capacity import Placed
from composer_mesh.planning.mesh_layout import plan_mesh
from composer_mesh.services.directory.claim import holds_a_run
from composer_mesh.services.launch.ports import Order, Plan
from composer_mesh.services.launch.workers import CONTROLLER, authority_of, workers_of
from composer_mesh.services.pool.process_placement import ProcessPlacements


def makes_authority(order: Order) -> bool:
    """Whether the run's hosts use TLS with the run's own certificate authority."""
    cluster = order.config.cluster
    if cluster.kind not in ("hosts", "slurm") or cluster.authority is not None:
        return False  # a pod launcher stores it in a Secret
    return not any(
        channel_of(one).startswith("tcp:") for one in (*cluster.workers, cluster.address or "")
    )


def print_plan(order: Order, plan: Plan) -> None:
    """Print all files and commands, in order, and where each process of the run will be."""
    if not order.resume and holds_a_run(order.output):
        print(f"# the earlier run in {order.output} would be moved aside")
    for path, text in plan.files.items():
        print(f"# file {path}")
        print("(secret, not shown)" if path in plan.secret else text.rstrip("\n"))
        print()
    if makes_authority(order):
        print(f"# certificate authority of the run: {authority_of(order)} (secret, not shown)\n")
    print(f"# commands, in {order.folder}")
    for command in plan.commands:
        print(shlex.join(command))
    if any(CONTROLLER in command for command in plan.commands):
        print(f"# {CONTROLLER} is the process id of train, known when that has been started")
    for line in (*_expected(order), *_processes(order)):
        print(f"# {line}")


def _expected(order: Order) -> Sequence[str]:
    """Describe the workers that the user has to start."""
    if order.config.cluster.kind != "hosts":
        return []
    return [
        f"worker {one.name} must be running already: {shlex.join(one.command(order))}"
        for one in workers_of(order)
        if one.expected
    ]


def _processes(order: Order) -> Iterator[str]:
    """Yield each process with its host and variables, the ranks' meeting point and transports."""
    placements = ProcessPlacements.of(order.config)
    placed = placements.placement.placed
    if not placed:
        yield "processes are placed when the hosts are known: describe them in placement.hosts"
        return
    every = " ".join(f"{name}={value}" for name, value in SETTINGS.items())
    yield f"every process, unless its host sets another value: {every}"
    yield "processes, with the variables that each gets on its host:"
    for kind in dict.fromkeys(one.process.kind for one in placed):
        for number, one in enumerate(placements.placement.of_kind(kind)):
            env = placements.env(kind, number) | {VISIBLE: ",".join(map(str, one.gpus))}
            variables = " ".join(f"{name}={value}" for name, value in env.items() if value)
            rank = f" rank {number}" if kind == "trainer" else ""
            yield f"  {one.host} {one.process.name}{rank}: {variables}"
    yield from _network(order.config, placements.placement.of_kind("trainer"))


def _network(config: Config, ranks: Sequence[Placed]) -> Iterator[str]:
    if len(ranks) > 1:
        hosts = list(dict.fromkeys(one.host for one in ranks))
        backend = "NCCL" if ranks[0].gpus else "gloo"
        where = (
            f"the cluster address of {hosts[0]}" if len(hosts) > 1 else f"loopback of {hosts[0]}"
        )
        if config.cluster.remote:
            yield (
                f"ranks 0 to {len(ranks) - 1} meet at a free TCP port of rank 0 on {where}; "
                f"{backend} uses its interface ({', '.join(IFNAMES)})"
            )
    for row in plan_mesh(config).transports:
        yield str(row)

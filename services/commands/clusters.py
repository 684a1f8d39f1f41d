"""CLI commands that launch a run on hosts, start a worker, add a host, and stop a run.

Each imports its implementation when it runs.
"""

import argparse
from pathlib import Path

from composer_mesh.services.checks.accepting import UsageError
from composer_mesh.services.commands.parser import (
    RUN,
    add_config,
    argument,
    command,
    output,
    seconds,
)


@command(
    "start a run on its hosts, on a cluster or in the background",
    add_config,
    output("the run's directory, the same on all hosts (default: runs/NAME)"),
    argument("--resume", action="store_true", help="continue the run in that directory"),
    argument("--dry-run", action="store_true", help="print every file and command; change nothing"),
    argument("--detach", action="store_true", help="do not follow the run's output until it ends"),
    group="servers",
    example="launch run.toml --dry-run",
)
def launch(arguments: argparse.Namespace) -> int:
    """Launch a run on its configured cluster, and follow its output."""
    from composer_mesh.services.launch.command import launch_command

    return launch_command(arguments)


@command(
    "offer this host to a run",
    argument(
        "--listen",
        default="tls://auto:0",
        metavar="ADDRESS",
        help=(
            "address to listen on, tls://HOST:PORT or tcp://HOST:PORT; auto is this host's "
            "private address, port 0 a free one (default: tls://auto:0)"
        ),
    ),
    argument("--name", default="", help="name of this host in the run (default: its own)"),
    argument(
        "--roster", type=Path, metavar="DIR", help="folder in which workers announce themselves"
    ),
    argument(
        "--authority",
        type=Path,
        metavar="DIR",
        help="folder with ca.pem and ca.key; required for tls",
    ),
    argument(
        "--lease",
        type=seconds,
        default=15.0,
        metavar="S",
        help=(
            "seconds without the controller after which everything of the run here ends "
            "(default: 15)"
        ),
    ),
    argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds to wait for the controller (default: 600)",
    ),
    argument(
        "--with-process", type=int, metavar="PID", help="end when this local process has ended"
    ),
    argument(
        "--subnet",
        action="append",
        default=[],
        metavar="CIDR",
        help=(
            "network with the addresses to listen on; may be given many times (default: any "
            "private one)"
        ),
    ),
    argument(
        "--any-address",
        action="store_true",
        help="listen on public addresses too, where whoever connects may run any code",
    ),
    many_files=True,
    group="servers",
    example="worker --listen tls://auto:0 --roster runs/quickstart/roster",
)
def worker(arguments: argparse.Namespace) -> int:
    """Offer this machine to a run as a worker, until the run releases it."""
    from composer_mesh.mesh.hosts.address import BadAddress
    from composer_mesh.mesh.hosts.certificates import BadAuthority
    from composer_mesh.mesh.hosts.worker import WorkerOptions, WorkerRefused, worker_command

    options = WorkerOptions(
        listen=arguments.listen,
        name=arguments.name,
        roster=arguments.roster,
        authority=arguments.authority,
        lease_s=arguments.lease,
        wait_s=arguments.wait,
        with_process=arguments.with_process,
        subnets=tuple(arguments.subnet),
        any_address=arguments.any_address,
    )
    try:
        return worker_command(options)
    except (BadAddress, BadAuthority, WorkerRefused) as refused:
        raise UsageError(str(refused)) from refused


@command(
    "write a checkpoint of a run and end it",
    RUN,
    argument(
        "--now", action="store_true", help="stop in the middle of the step, without a checkpoint"
    ),
    group="runs",
    example="stop runs/quickstart",
)
def stop(arguments: argparse.Namespace) -> int:
    """Make a run write a checkpoint and end."""
    from composer_mesh.services.launch.command import stop_command

    return stop_command(arguments.run, arguments.now)


@command(
    "add a host to a live run",
    RUN,
    argument(
        "address", metavar="ADDRESS", help="address of a worker, such as tls://10.0.0.7:22300"
    ),
    group="servers",
    example="join runs/quickstart tls://10.0.0.7:22300",
)
def join(arguments: argparse.Namespace) -> int:
    """Add a host to a running run."""
    from composer_mesh.services.launch.command import join_command

    return join_command(arguments.run, arguments.address)

"""CLI commands that launch a run on hosts, start a worker, add a host, and stop a run.

Each imports its implementation when it runs.
"""

import argparse

from composer_mesh.services.checks.accepting import UsageError


def launch(arguments: argparse.Namespace) -> int:
    """Launch a run on its configured cluster, and follow its output."""
    from composer_mesh.services.launch.command import launch_command

    return launch_command(arguments)


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


def stop(arguments: argparse.Namespace) -> int:
    """Make a run write a checkpoint and end."""
    from composer_mesh.services.launch.stop_command import stop_command

    return stop_command(arguments.run, arguments.now)


def join(arguments: argparse.Namespace) -> int:
    """Add a host to a running run."""
    from composer_mesh.services.launch.join_command import join_command

    return join_command(arguments.run, arguments.address)

"""The commands that bring a run to its hosts, offer a host, add one, and stop a run.

Each hands over to its own module, imported when it runs.
"""

import argparse

from composer_mesh.services.checks.accepting import UsageError


def launch(arguments: argparse.Namespace) -> int:
    """Bring a run to where its config says, and follow it."""
    from composer_mesh.services.launch.command import launch_command

    return launch_command(arguments)


def worker(arguments: argparse.Namespace) -> int:
    """Offer this machine to a run, until that gives it back."""
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
    """Let a run write a checkpoint and end."""
    from composer_mesh.services.launch.stop_command import stop_command

    return stop_command(arguments.run, arguments.now)


def join(arguments: argparse.Namespace) -> int:
    """Add a host to a run that goes on."""
    from composer_mesh.services.launch.join_command import join_command

    return join_command(arguments.run, arguments.address)

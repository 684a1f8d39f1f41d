"""`composer-mesh launch`: launches a run on its configured cluster, and follows it.

All refusals come before anything is written. The launchers implement what depends on the kind of
cluster; this module defines the order of actions and the output for the user.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.configs.load import load_config
from composer_mesh.configs.paths import with_whole_paths
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.hosts.certificates import BadAuthority, make_authority
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.programs import ProgramFailed
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.services.checks.accepting import accepted, use_umask
from composer_mesh.services.directory.claim import (
    RUNS,
    claimed,
    holds_a_run,
    refuse_a_used,
    set_aside,
)
from composer_mesh.services.directory.resume import (
    RunFinished,
    may_be_resumed,
    pinned,
    refuse_unfit,
)
from composer_mesh.services.launch.handle import follow, hints, read_handle, write_handle
from composer_mesh.services.launch.ports import (
    Handle,
    Launcher,
    LaunchFailed,
    LaunchRefused,
    Order,
    Plan,
    launcher_of,
)
from composer_mesh.services.launch.workers import (
    CONTROLLER,
    FOLDER,
    authority_of,
    with_config,
    workers_of,
    write_files,
)


def launch_command(arguments: argparse.Namespace) -> int:
    """Launch a run. Returns its exit status, 0 with --detach, 130 if Ctrl-C ended the following."""
    config = load_config(arguments.config, arguments.set)
    if arguments.resume:
        config = pinned(config, arguments.output or RUNS / config.run.name)
    config = accepted(config, here=False)
    use_umask(config)
    output = (arguments.output or RUNS / config.run.name).absolute()
    if (status := _refuse(output, config, arguments)) is not None:
        return status
    order = Order(
        with_whole_paths(config),
        tuple(described_hosts(config.placement)),
        output,
        Path.cwd(),
        config.cluster.python or sys.executable,
        arguments.resume,
    )
    launcher = launcher_of(config.cluster.kind)
    plan = with_config(order, launcher.plan(order))
    if arguments.dry_run:
        print_plan(order, plan)
        return 0
    handle = submit(launcher, order, plan, named=arguments.output is not None)
    _print_handle(output, handle, config.run.telemetry)
    return 0 if arguments.detach else follow(launcher, handle, output)


def _refuse(output: Path, config: Config, arguments: argparse.Namespace) -> int | None:
    """Raise if the run may not use that directory; return a status if the run is finished."""
    refuse_a_live(output)
    if not arguments.resume:
        if arguments.output is not None:
            refuse_a_used(output)
        return None
    if not may_be_resumed(output) and _is_elsewhere(output):
        return None  # its directory is on a volume that only the run can access
    try:
        refuse_unfit(output, config)
    except RunFinished as finished:
        print(f"nothing to do: {finished}")
        return 0
    return None


def refuse_a_live(output: Path) -> None:
    """Raise `LaunchRefused` if the run of a directory is under way."""
    handle = read_handle(output)
    if handle is None:
        return
    state, word = launcher_of(handle.kind).state(handle)
    if state in ("running", "waiting"):
        raise LaunchRefused(
            f"{output} has a run that is {state} ({word}) but takes one at a time: end it with "
            f"composer-mesh stop {shlex.quote(str(output))}, or name another directory"
        )


def _is_elsewhere(output: Path) -> bool:
    handle = read_handle(output)
    return handle is not None and handle.run != output


def submit(launcher: Launcher, order: Order, plan: Plan, named: bool) -> Handle:
    """Write the files, create the certificate authority, and submit to the cluster."""
    if not (order.resume or named) and (place := set_aside(order.output)):
        print(f"composer-mesh: moved the earlier run to {place}", file=sys.stderr)
    try:
        with claimed(order.output):  # refuses while a run is still being written
            with OpenFolder(order.output) as opened:
                opened.make(FOLDER)
            write_files(plan)
            if _makes_authority(order):
                make_authority(authority_of(order))
        handle = launcher.submit(order, plan)
    except BadAuthority as bad:
        raise LaunchRefused(str(bad)) from bad
    except ProgramFailed as failed:
        raise LaunchFailed(str(failed)) from failed
    write_handle(order.output, handle)
    return handle


def _makes_authority(order: Order) -> bool:
    """Whether the run's hosts use TLS with the run's own certificate authority."""
    cluster = order.config.cluster
    if cluster.kind not in ("hosts", "slurm") or cluster.authority is not None:
        return False  # a pod launcher stores it in a Secret
    return not any(one.startswith("tcp:") for one in (*cluster.workers, cluster.address or ""))


def print_plan(order: Order, plan: Plan) -> None:
    """Print all files and commands, in order."""
    if not order.resume and holds_a_run(order.output):
        print(f"# the earlier run in {order.output} would be moved aside")
    for path, text in plan.files.items():
        print(f"# file {path}")
        print("(secret, not shown)" if path in plan.secret else text.rstrip("\n"))
        print()
    if _makes_authority(order):
        print(f"# certificate authority of the run: {authority_of(order)} (secret, not shown)\n")
    print(f"# commands, in {order.folder}")
    for command in plan.commands:
        print(shlex.join(command))
    if any(CONTROLLER in command for command in plan.commands):
        print(f"# {CONTROLLER} is the process id of train, known when that has been started")
    for line in _expected(order):
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


def _print_handle(output: Path, handle: Handle, telemetry: bool) -> None:
    print(f"launched {output} as {handle.kind} {handle.job}")
    for line in hints(output, handle, telemetry):
        print(f"  {line}")
    sys.stdout.flush()

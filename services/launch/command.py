"""The commands that launch a run, stop it, and add a host to it.

`launch` launches a run on its configured cluster, and follows it. All refusals come before anything
is written. The launchers implement what depends on the kind of cluster; this module defines the
order of actions and the output for the user.

`stop` makes a run write a checkpoint and end, and prints how to resume it. It requests this from
the controller; if that does not answer, from the cluster or by a signal. `join` adds a host.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from composer_mesh.configs.load import load_config
from composer_mesh.configs.paths import with_whole_paths
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.hosts.address import BadAddress, split
from composer_mesh.mesh.hosts.certificates import BadAuthority, make_authority
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.programs import ProgramFailed
from composer_mesh.planning.placement_solver import described_hosts
from composer_mesh.services.checks.accepting import accepted, use_umask
from composer_mesh.services.directory.claim import (
    RUNS,
    claimed,
    holder,
    refuse_a_used,
    set_aside,
)
from composer_mesh.services.directory.control import ControlRefused, ask
from composer_mesh.services.directory.resume import (
    THERE,
    RunFinished,
    describe_resume,
    may_be_resumed,
    pinned,
    refuse_unfit,
    resume_command,
)
from composer_mesh.services.directory.status import RunUnavailable, read_status
from composer_mesh.services.launch.dry_run import makes_authority, print_plan
from composer_mesh.services.launch.handle import (
    HandleNotOurs,
    follow,
    hints,
    read_handle,
    write_handle,
)
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
    FOLDER,
    authority_of,
    with_config,
    write_files,
)
from composer_mesh.services.schedule.stopping import GRACE_S, SHUTDOWN_S


def join_command(run: Path, address: str) -> int:
    """Request that a live run attaches a worker. Waits until it is attached."""
    try:
        split(address)
    except BadAddress as bad:
        raise ControlRefused(str(bad)) from bad
    answer = asyncio.run(ask(run, "join", address=address))
    sys.stdout.write(f"{answer}\n")
    return 0


POLL_S = 0.1


def stop_command(run: Path, now: bool = False) -> int:
    """Stop a run and wait for its end; return the exit status, 1 if it failed."""
    if (handle := _own_handle(run)) is not None:
        launcher_of(handle.kind).stopping(handle)
    try:
        patient = asyncio.run(ask(run, "stop", now=now))
        _say("a checkpoint is written, then the run ends" if patient else "the run ends")
        _wait_for_the_end(run)
    except RunUnavailable as unavailable:
        _by_who_started_it(run, now, unavailable)
    return _tell(run)


def _by_who_started_it(run: Path, now: bool, unavailable: RunUnavailable) -> None:
    """Stop an unresponsive or unstarted run by signal or cluster; raises if there is none."""
    if pid := holder(run):
        _say(f"process {pid} takes no commands now: it is sent a signal")
        try:
            os.kill(pid, signal.SIGINT if now else signal.SIGTERM)
        except PermissionError:
            raise RunUnavailable(
                f"process {pid}, which trains in {run}, is of another user: only they can stop it"
            ) from None
        _wait_for_the_end(run)
        return
    handle = _own_handle(run)
    if handle is None or not _is_there(handle):
        raise unavailable
    _say(f"the controller does not answer: {handle.kind} {handle.job} is ended")
    try:
        launcher_of(handle.kind).stop(handle, 0.0 if now else GRACE_S + SHUTDOWN_S)
    except ProgramFailed as failed:
        raise LaunchFailed(str(failed)) from failed


def _own_handle(run: Path) -> Handle | None:
    """Return the handle of a run, None if it was not launched or another machine launched it.

    A stop that was forwarded to the controller's host needs none, and may lack the account's key
    there: the machine that forwarded it has prepared the cluster and continues with it.
    """
    try:
        return read_handle(run)
    except HandleNotOurs:
        if THERE in os.environ:
            return None
        raise


def _is_there(handle: Handle) -> bool:
    try:
        return launcher_of(handle.kind).state(handle)[0] in ("running", "waiting", "unknown")
    except ProgramFailed as failed:
        raise LaunchFailed(str(failed)) from failed


def _wait_for_the_end(run: Path) -> None:
    """Wait until the process that holds the run's directory is gone."""
    pid = holder(run)
    while pid is not None and is_alive(pid):
        time.sleep(POLL_S)


def _tell(run: Path) -> int:
    status, handle = read_status(run), _own_handle(run)
    if status is None and handle is not None and handle.run != run.absolute():
        sys.stdout.write(f"ended; continue with: {resume_command(run)}\n")
        return 0
    if status is None:
        sys.stdout.write("stopped before it had begun\n")
        return 0
    if status.state == "failed":
        raise RunUnavailable(f"{run} has failed before it could stop: look at its events")
    if status.state == "finished":
        sys.stdout.write("it had come to its end\n")
        return 0
    sys.stdout.write(
        f"{describe_resume(run, status.steps)}\ncontinue with: {resume_command(run)}\n"
    )
    return 0


def _say(words: str) -> None:
    sys.stderr.write(f"composer-mesh: {words}\n")


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
            if makes_authority(order):
                make_authority(authority_of(order))
        handle = launcher.submit(order, plan)
    except BadAuthority as bad:
        raise LaunchRefused(str(bad)) from bad
    except ProgramFailed as failed:
        raise LaunchFailed(str(failed)) from failed
    write_handle(order.output, handle)
    return handle


def _print_handle(output: Path, handle: Handle, telemetry: bool) -> None:
    print(f"launched {output} as {handle.kind} {handle.job}")
    for line in hints(output, handle, telemetry):
        print(f"  {line}")
    sys.stdout.flush()

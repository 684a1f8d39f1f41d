"""`composer-mesh stop`: makes a run write a checkpoint and end, and prints how to resume it.

It requests this from the controller; if that does not answer, from the cluster or by a signal.

`composer-mesh join`: adds a host to a running run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from composer_mesh.mesh.hosts.address import BadAddress, split
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.programs import ProgramFailed
from composer_mesh.services.directory.claim import holder
from composer_mesh.services.directory.control import ControlRefused, ask
from composer_mesh.services.directory.resume import describe_resume
from composer_mesh.services.directory.status import RunUnavailable, read_status
from composer_mesh.services.launch.handle import (
    THERE,
    HandleNotOurs,
    read_handle,
    resume_command,
)
from composer_mesh.services.launch.ports import Handle, LaunchFailed, launcher_of
from composer_mesh.services.schedule.stopping import GRACE_S, TAKE_DOWN_S


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
        launcher_of(handle.kind).stop(handle, 0.0 if now else GRACE_S + TAKE_DOWN_S)
    except ProgramFailed as failed:
        raise LaunchFailed(str(failed)) from failed


def _own_handle(run: Path) -> Handle | None:
    """Return the handle of a run, None if it was not launched or another machine launched it.

    A stop that was forwarded to the controller's host needs none, and may lack the account's key
    there: the machine that forwarded it has prepared the cluster and goes on with it.
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
        sys.stdout.write(f"ended; go on with: {resume_command(run)}\n")
        return 0
    if status is None:
        sys.stdout.write("stopped before it had begun\n")
        return 0
    if status.state == "failed":
        raise RunUnavailable(f"{run} has failed before it could stop: look at its events")
    if status.state == "finished":
        sys.stdout.write("it had come to its end\n")
        return 0
    sys.stdout.write(f"{describe_resume(run, status.steps)}\ngo on with: {resume_command(run)}\n")
    return 0


def _say(words: str) -> None:
    sys.stderr.write(f"composer-mesh: {words}\n")

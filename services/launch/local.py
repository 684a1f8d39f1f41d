"""Launches `train` on this machine in its own session, so that it survives its terminal.

Detached local processes: identified, followed and ended.

A process is named by its id and start time, because ids are reused.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from composer_mesh.mesh import programs
from composer_mesh.mesh.processes import is_alive, kill_group, start_ticks
from composer_mesh.services.inspection.events_command import Lines
from composer_mesh.services.launch.orders import controller_command, log_file, renamed_log
from composer_mesh.services.launch.ports import Handle, OnlyTheController, Order, Plan, State
from composer_mesh.services.launch.ssh_words import prefix

POLL_S = 0.2


class Paced:
    """Caches a boolean answer for some time."""

    def __init__(self, ask: Callable[[], bool], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._answer, self._next = True, time.monotonic()

    def __call__(self) -> bool:
        if time.monotonic() >= self._next:
            self._answer = self._ask()
            self._next = time.monotonic() + self._every_s
        return self._answer


def name_of(pid: int) -> str:
    """Return a process's unique name."""
    return f"{pid}@{start_ticks(pid) or '?'}"


def pid_of(name: str) -> int:
    """Return the process id in a name."""
    return int(name.partition("@")[0])


def lives(name: str) -> bool:
    """Whether that process is alive, and not another with the same id."""
    pid = pid_of(name)
    return is_alive(pid) and name == name_of(pid)


def lines_of(log: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of a log as they are written, until `goes_on` returns False."""
    return Lines(log).until_the_end(goes_on, lambda: time.sleep(POLL_S))


def end(name: str, grace_s: float) -> None:
    """Send SIGTERM; if it is still alive after the grace period, kill its process group."""
    if not lives(name):
        return
    os.kill(pid_of(name), signal.SIGTERM)
    until = time.monotonic() + grace_s
    while lives(name):
        if time.monotonic() >= until:
            kill_group(pid_of(name))
            return
        time.sleep(POLL_S)


class LocalLauncher(OnlyTheController):
    """Starts a detached controller on this machine."""

    def plan(self, order: Order) -> Plan:
        how = ["--resume"] if order.resume else []
        return Plan(commands=[controller_command(order.python, order.output, *how)])

    def submit(self, order: Order, plan: Plan) -> Handle:
        (command,) = plan.commands
        renamed_log(log_file(order.output))
        return started_here(order, command)

    def reach(self, handle: Handle) -> tuple[str, ...]:
        return prefix(handle.destination, handle.options) if handle.destination else ()

    def state(self, handle: Handle) -> tuple[State, str]:
        if lives(handle.job):
            return "running", f"process {pid_of(handle.job)}"
        return "ended", f"process {pid_of(handle.job)} is gone"

    def follow(self, handle: Handle) -> Iterator[str]:
        assert handle.log is not None
        return lines_of(handle.log, lambda: lives(handle.job))

    def stop(self, handle: Handle, grace_s: float) -> None:
        end(handle.job, grace_s)


def started_here(order: Order, command: Sequence[str]) -> Handle:
    """Start the controller of a run on this machine; it outlives this process."""
    log = log_file(order.output)
    job = name_of(programs.detached(command, log, order.folder))
    kind = order.config.cluster.kind
    return Handle(kind, order.output, job, order.python, order.folder, log=log)

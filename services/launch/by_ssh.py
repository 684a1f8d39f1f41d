"""Launches a run on hosts at given addresses; the controller is here or on the first host.

ssh, no tunnel    workers and controller run detached on their hosts, independent of this one
ssh, a tunnel     the controller is here, and each worker in the ssh that tunnels its port
no ssh            the controller and workers on loopback are here; others must be running

On this machine `train` has a session of its own, so that it survives its terminal.

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
from composer_mesh.mesh.hosts.roster import ROSTER
from composer_mesh.mesh.processes import is_alive, kill_group, start_ticks
from composer_mesh.services.inspection.events_command import FollowedLines
from composer_mesh.services.launch.handle import (
    inside,
    left_behind,
    prefix,
    refuse_unstorable,
    to,
)
from composer_mesh.services.launch.ports import (
    Handle,
    LaunchFailed,
    OnlyTheController,
    Order,
    Plan,
    State,
)
from composer_mesh.services.launch.workers import (
    CONTROLLER,
    WorkerCommand,
    controller_command,
    is_here,
    log_file,
    renamed_log,
    workers_of,
)

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
    return FollowedLines(log).until_the_end(goes_on, lambda: time.sleep(POLL_S))


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


def started_here(order: Order, command: Sequence[str]) -> Handle:
    """Start the controller of a run on this machine; it outlives this process."""
    log = log_file(order.output)
    job = name_of(programs.detached(command, log, order.folder))
    kind = order.config.cluster.kind
    return Handle(kind, order.output, job, order.python, order.folder, log=log)


STATE_S = 20.0
ASK_S = 5.0
"""Seconds between checks whether a remote controller is running, while its log is followed."""


class HostsLauncher(OnlyTheController):
    """Launches a run on hosts whose addresses are configured; its controller may be here.

    A run on this machine alone has no workers.
    """

    def plan(self, order: Order) -> Plan:
        before, after = _begun_by_us(order)
        commands = [_start(order, one) for one in before]
        return Plan(
            commands=[*commands, _controller(order), *(one.command(order) for one in after)]
        )

    def submit(self, order: Order, plan: Plan) -> Handle:
        before, after = _begun_by_us(order)
        renamed_log(log_file(order.output))
        for one in (*before, *after):
            renamed_log(one.log(order))
            # A record of an earlier start would be taken for a worker.
            (order.output / ROSTER / f"{one.name}.json").unlink(missing_ok=True)
        commands, started = iter(plan.commands), list[tuple[WorkerCommand, int]]()
        try:
            for one in before:
                pid = _begin(order, one, next(commands))
                started.append((one, pid))
            handle = _begin_controller(order, next(commands))
        except programs.ProgramFailed as failed:
            _undo(order, started)
            ended = "; workers that had been started are ended" if started else ""
            raise LaunchFailed(f"{failed}{ended}") from None
        for one in after:
            pid = pid_of(handle.job)
            words = [str(pid) if word == CONTROLLER else word for word in next(commands)]
            programs.detached(words, one.log(order), order.folder)
        return handle

    def reach(self, handle: Handle) -> tuple[str, ...]:
        return prefix(handle.destination, handle.options) if handle.destination else ()

    def state(self, handle: Handle) -> tuple[State, str]:
        if not handle.destination:
            where = f"process {pid_of(handle.job)}"
            return ("running", where) if lives(handle.job) else ("ended", f"{where} is gone")
        text = inside(handle.folder, ["kill", "-0", handle.job])
        done = programs.run([*self.reach(handle), text], check=False, deadline_s=STATE_S)
        where = f"process {handle.job} on {handle.destination}"
        if done.status == 255:  # an error of ssh itself
            return "unknown", f"{where}: {done.stderr.strip() or 'ssh failed'}"
        return ("ended" if done.status else "running"), where

    def follow(self, handle: Handle) -> Iterator[str]:
        assert handle.log is not None
        every_s = ASK_S if handle.destination else 0.0
        return lines_of(handle.log, Paced(lambda: self.state(handle)[0] != "ended", every_s))

    def stop(self, handle: Handle, grace_s: float) -> None:
        if not handle.destination:
            end(handle.job, grace_s)
            return
        script = (
            'kill -TERM "$1" 2>/dev/null || exit 0; n=0; '
            'while kill -0 "$1" 2>/dev/null; do '
            'n=$((n+1)); [ $n -gt "$2" ] && { kill -KILL "$1"; exit 0; }; sleep 1; done'
        )
        words = ["sh", "-c", script, "sh", handle.job, f"{grace_s:.0f}"]
        text = inside(handle.folder, words)
        programs.run([*self.reach(handle), text], deadline_s=grace_s + STATE_S)


def _begun_by_us(order: Order) -> tuple[list[WorkerCommand], list[WorkerCommand]]:
    """Workers that are started by ssh, and those that are started here after the controller."""
    ours = [one for one in workers_of(order) if not one.expected]
    by_ssh = [one for one in ours if one.destination]
    return by_ssh, [one for one in ours if not one.destination]


def _controller(order: Order) -> list[str]:
    """Return the local command that starts the controller on its host."""
    how = ["--resume"] if order.resume else []
    command = controller_command(order.python, order.output, *how)
    if ssh := _ssh_of_the_controller(order):
        return [*prefix(*ssh), left_behind(order.folder, command, log_file(order.output))]
    return command


def _begin_controller(order: Order, command: Sequence[str]) -> Handle:
    if not (ssh := _ssh_of_the_controller(order)):
        return started_here(order, command)
    job, log = str(_pid(command, programs.run(command).stdout)), log_file(order.output)
    destination, options = ssh
    return Handle("hosts", order.output, job, order.python, order.folder, log, destination, options)


def _ssh_of_the_controller(order: Order) -> tuple[str, tuple[str, ...]] | None:
    """Return destination and options of ssh to the controller's host; None for this machine."""
    ssh, workers = order.config.cluster.ssh, workers_of(order)
    if ssh is None or ssh.tunnel or not workers or is_here(workers[0].address):
        return None
    refuse_unstorable(workers[0].destination, ssh.options)
    return workers[0].destination, ssh.options


def _start(order: Order, one: WorkerCommand) -> list[str]:
    """Return the local command that starts a worker by ssh."""
    command, ssh = one.command(order), order.config.cluster.ssh
    assert ssh is not None
    if one.tunnel:
        return [*one.tunnel, inside(order.folder, command)]
    return [*to(one.destination, ssh), left_behind(order.folder, command, one.log(order))]


def _begin(order: Order, one: WorkerCommand, command: Sequence[str]) -> int:
    """Start a worker by ssh; return its remote process id, or that of its tunnel's ssh."""
    if one.tunnel:
        return programs.detached(command, one.log(order), order.folder)
    return _pid(command, programs.run(command).stdout)


def _undo(order: Order, started: Sequence[tuple[WorkerCommand, int]]) -> None:
    """End workers of a failed launch; an unreachable one ends when no controller attaches."""
    for one, pid in started:
        ssh = order.config.cluster.ssh
        if one.tunnel or ssh is None:
            end(name_of(pid), 0.0)
        else:
            text = inside(order.folder, ["kill", "-TERM", str(pid)])
            programs.run([*to(one.destination, ssh), text], check=False, deadline_s=STATE_S)


def _pid(command: Sequence[str], said: str) -> int:
    """Parse a process id from the last line of output, as shells may print a greeting before."""
    last = said.strip().rpartition("\n")[2].strip()
    if not last.isdecimal():
        raise programs.ProgramFailed(command, f"it gave no process id but {said.strip()[-200:]!r}")
    return int(last)

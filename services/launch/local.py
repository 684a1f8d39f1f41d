"""Launches `train` on this machine in its own session, so that it survives its terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from composer_mesh.mesh import programs
from composer_mesh.services.launch import detached
from composer_mesh.services.launch.orders import controller_command, log_file, renamed_log
from composer_mesh.services.launch.ports import Handle, OnlyTheController, Order, Plan, State
from composer_mesh.services.launch.ssh_words import prefix


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
        if detached.lives(handle.job):
            return "running", f"process {detached.pid_of(handle.job)}"
        return "ended", f"process {detached.pid_of(handle.job)} is gone"

    def follow(self, handle: Handle) -> Iterator[str]:
        assert handle.log is not None
        return detached.lines_of(handle.log, lambda: detached.lives(handle.job))

    def stop(self, handle: Handle, grace_s: float) -> None:
        detached.end(handle.job, grace_s)


def started_here(order: Order, command: Sequence[str]) -> Handle:
    """Start the controller of a run on this machine; it outlives this process."""
    log = log_file(order.output)
    job = detached.name_of(programs.detached(command, log, order.folder))
    kind = order.config.cluster.kind
    return Handle(kind, order.output, job, order.python, order.folder, log=log)

"""Runs as batch jobs of Slurm: submit, watch, follow, reach and stop one.

The launcher is only a client. The job contains all that a run needs, so the launcher may exit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.services.inspection.events_command import Lines
from composer_mesh.services.launch.orders import renamed_log
from composer_mesh.services.launch.ports import Handle, LaunchFailed, Order, Plan, State
from composer_mesh.services.launch.slurm import queue
from composer_mesh.services.launch.slurm.places import Places
from composer_mesh.services.launch.slurm.queue import JobState
from composer_mesh.services.launch.slurm.script import job_script, reach_script
from composer_mesh.services.store.whole_files import write_whole

LONGEST_JOB = 64
CANCELLED_S = 60.0
"""Longest time from scancel to a job's end: Slurm kills after KillWait, 30 s by default."""


@dataclass
class SlurmLauncher:
    """The launcher of kind "slurm"; polls files every `look_s` and Slurm every `ask_s`."""

    look_s: float = 1.0
    ask_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def plan(self, order: Order) -> Plan:
        """Return one script and one sbatch, without a query. Raises `LaunchRefused`."""
        places = Places(order.output)
        return Plan(
            files={places.script: job_script(order)},
            commands=(("sbatch", "--parsable", str(places.script)),),
        )

    def submit(self, order: Order, plan: Plan) -> Handle:
        """Submit the job, whose files have been written. Raises `LaunchFailed`."""
        places = Places(order.output)
        for left in (places.stopping, places.queued_at, places.job):
            left.unlink(missing_ok=True)
        renamed_log(places.log)
        (command,) = plan.commands
        job = queue.submit(command)
        write_whole(places.job, f"{job}\n".encode())
        return Handle(
            kind="slurm",
            run=order.output,
            job=job,
            python=order.python,
            folder=order.folder,
            log=places.log,
            setup=order.config.cluster.slurm.setup,
        )

    def reach(self, handle: Handle) -> tuple[str, ...]:
        """Return a shell that goes into the job; its script is made of the handle alone."""
        return ("bash", "-c", reach_script(handle), "reach.sh")

    def state(self, handle: Handle) -> tuple[State, str]:
        """Return the job's state, and Slurm's name for it."""
        found = queue.ask(_job(handle))
        return found.state, str(found)

    def follow(self, handle: Handle) -> Iterator[str]:
        """Yield the controller's output until the job has ended for good, across requeues."""
        tail, said = Lines(Places(handle.run).log), ""
        while True:
            job = _job(handle)
            found = queue.ask(job)
            if (now := _waits(job, found)) != said and now:
                yield now
            said = now
            if found.state == "ended" and _job(handle) == job:
                yield from tail.rest()
                yield f"job {job} has ended: {found}"
                return
            yield from self._lines_until_asked_again(tail)

    def stopping(self, handle: Handle) -> None:
        """Mark the run as stopping, so that it is not requeued near its time limit either."""
        places = Places(handle.run)
        places.folder.mkdir(parents=True, exist_ok=True)
        write_whole(places.stopping, b"")

    def stopped(self, handle: Handle) -> None:
        """Do nothing: the job ends with its controller."""

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Let the run write a checkpoint, then end the job; it is not queued again."""
        self.stopping(handle)
        job = _job(handle)
        if grace_s > 0 and queue.ask(job).state in ("running", "unknown"):
            queue.tell(job)
            if self._ends_within(handle, grace_s).state == "ended":
                return
        queue.cancel(_job(handle))
        found = self._ends_within(handle, CANCELLED_S)
        if found.state != "ended":
            raise LaunchFailed(
                f"job {_job(handle)} is still {found}, {CANCELLED_S:g} s after scancel: look at "
                "its nodes, where a process may hang in the kernel"
            )

    def _lines_until_asked_again(self, tail: Lines) -> Iterator[str]:
        end = self.clock() + self.ask_s
        while True:
            yield from tail.new()
            self.sleep(self.look_s)
            if self.clock() >= end:
                return

    def _ends_within(self, handle: Handle, deadline_s: float) -> JobState:
        """Return the state of the job when it has ended, else the one at the deadline.

        A job that is being requeued is cancelled too.
        """
        end = self.clock() + deadline_s
        while True:
            found = queue.ask(_job(handle))
            if found.state == "waiting":
                queue.cancel(_job(handle))
            if found.state == "ended" or self.clock() >= end:
                return found
            self.sleep(self.look_s)


def _job(handle: Handle) -> str:
    """Return the run's current job id: a job that Slurm would not requeue is resubmitted."""
    try:
        found = read_regular(Places(handle.run).job, LONGEST_JOB).strip()
    except OSError:
        return handle.job
    return found.decode() if found.isdigit() else handle.job


def _waits(job: str, found: JobState) -> str:
    """Describe a job without output; empty if it runs."""
    if found.state == "waiting":
        return f"job {job} waits: {found}"
    if found.state == "unknown":
        return f"job {job}: {found}"
    return ""

"""Runs as batch jobs of Slurm: submit, watch, follow, reach and stop one.

The launcher is only a client. The job contains all that a run needs, so the launcher may exit.

The state of a job, read from squeue, sacct or scontrol, whichever knows it.

Uses only formats that are stable since 19.05: no JSON. An unknown state is no error, and a
Slurm that does not answer is not the end of a job.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.programs import FinishedProgram, ProgramFailed, run
from composer_mesh.plugins.slurm.script import JobFiles, job_script, reach_script
from composer_mesh.services.inspection.events_command import FollowedLines
from composer_mesh.services.launch.ports import Handle, LaunchFailed, Order, Plan, State
from composer_mesh.services.launch.workers import renamed_log

WAITING = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ]
)
RUNNING = frozenset(
    [
        "RUNNING",
        "COMPLETING",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "UPDATE_DB",
        "POWER_UP_NODE",
    ]
)
ENDED = frozenset(
    [
        "COMPLETED",
        "CANCELLED",
        "FAILED",
        "TIMEOUT",
        "NODE_FAIL",
        "PREEMPTED",
        "BOOT_FAIL",
        "DEADLINE",
        "OUT_OF_MEMORY",
        "REVOKED",
        "LAUNCH_FAILED",
        "RECONFIG_FAIL",
        "EXPEDITING_FAIL",
    ]
)
NO_REASONS = frozenset({"", "None", "(null)"})
ASK_S = 30.0
FORGOTTEN = re.compile(r"Invalid job id|Invalid jobid", re.IGNORECASE)


@dataclass(frozen=True)
class JobState:
    """A job's state, Slurm's name for it, and why it waits, if Slurm reports it."""

    state: State
    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word} ({self.reason})" if self.reason else self.word


def state_of(word: str) -> State:
    """Return the state for a Slurm state, such as `CANCELLED by 1000` or `RUNNING`."""
    first = word.split(" ")[0].rstrip("+")
    if first in WAITING:
        return "waiting"
    if first in RUNNING:
        return "running"
    return "ended" if first in ENDED else "unknown"


def job_state(job: str) -> JobState:
    """Return a job's current state. Raises `LaunchFailed` only if Slurm is not installed."""
    said = _run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r"])
    if line := _first_line(said.stdout):
        word, _, reason = line.partition("|")
        state = state_of(word)
        shown = "" if reason in NO_REASONS or state != "waiting" else reason
        return JobState(state, word, shown)
    if said.status and not FORGOTTEN.search(said.stderr):
        return JobState("unknown", f"squeue: {_first_line(said.stderr) or 'it did not answer'}")
    return _of_the_past(job)


def cancel_job(job: str, *how: str) -> None:
    """Cancel a job, at once or as `how` says; one that has ended is no error.

    Raises `LaunchFailed`.
    """
    said = _run(["scancel", *how, job])
    over = FORGOTTEN.search(said.stderr) or "already complet" in said.stderr
    if said.status and not over:
        raise LaunchFailed(f"{' '.join(['scancel', *how, job])} failed: {said.stderr.strip()}")


def submit_job(command: Sequence[str]) -> str:
    """Submit, and return the job's id; raises `LaunchFailed` with sbatch's own message."""
    said = _run(command)
    # With several clusters it is `1234;name`; output of a site's plugin may come before it.
    found = re.search(r"^(\d+)(;\S+)?$", said.stdout, re.MULTILINE)
    if said.status or found is None:
        words = (said.stderr or said.stdout).strip() or f"status {said.status}"
        raise LaunchFailed(f"sbatch did not take the job: {words}")
    return found[1]


def _of_the_past(job: str) -> JobState:
    """Return the state of a job that squeue does not list, from sacct, else from scontrol."""
    word = _first_line(_run(["sacct", "-n", "-X", "-P", f"--jobs={job}", "--format=State"]).stdout)
    if not word:
        about = _run(["scontrol", "--oneliner", "show", "job", job]).stdout
        found = re.search(r"\bJobState=(\S+)", about)
        word = found[1] if found else ""
    if not word:
        return JobState("ended", "not known to Slurm any more")
    return JobState(state_of(word), word)


def _run(command: Sequence[str]) -> FinishedProgram:
    """Run a Slurm program; a timeout counts as an empty answer."""
    try:
        return run(command, deadline_s=ASK_S, check=False)
    except ProgramFailed as failed:
        if "not installed" in failed.said and command[0] != "sacct":
            raise LaunchFailed(
                f"{command[0]} is not installed here: launch from a login node of the cluster"
            ) from None
        return FinishedProgram(1, "", failed.said)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


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
        places = JobFiles(order.output)
        return Plan(
            files={places.script: job_script(order)},
            commands=(("sbatch", "--parsable", str(places.script)),),
        )

    def submit(self, order: Order, plan: Plan) -> Handle:
        """Submit the job, whose files have been written. Raises `LaunchFailed`."""
        places = JobFiles(order.output)
        for left in (places.stopping, places.queued_at, places.job):
            left.unlink(missing_ok=True)
        renamed_log(places.log)
        (command,) = plan.commands
        job = submit_job(command)
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
        found = job_state(_job(handle))
        return found.state, str(found)

    def follow(self, handle: Handle) -> Iterator[str]:
        """Yield the controller's output until the job has ended for good, across requeues."""
        tail, said = FollowedLines(JobFiles(handle.run).log), ""
        while True:
            job = _job(handle)
            found = job_state(job)
            if (now := _waits(job, found)) != said and now:
                yield now
            said = now
            if found.state == "ended" and _job(handle) == job:
                yield from tail.rest()
                yield f"job {job} has ended: {found}"
                return
            yield from self._lines_until_next_query(tail)

    def stopping(self, handle: Handle) -> None:
        """Mark the run as stopping, so that it is not requeued near its time limit either."""
        places = JobFiles(handle.run)
        places.folder.mkdir(parents=True, exist_ok=True)
        write_whole(places.stopping, b"")

    def stopped(self, handle: Handle) -> None:
        """Do nothing: the job ends with its controller."""

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Let the run write a checkpoint, then end the job; it is not queued again."""
        self.stopping(handle)
        job = _job(handle)
        if grace_s > 0 and job_state(job).state in ("running", "unknown"):
            cancel_job(job, "--batch", "--signal=TERM")  # SIGTERM to its script alone
            if self._ends_within(handle, grace_s).state == "ended":
                return
        cancel_job(_job(handle))
        found = self._ends_within(handle, CANCELLED_S)
        if found.state != "ended":
            raise LaunchFailed(
                f"job {_job(handle)} is still {found}, {CANCELLED_S:g} s after scancel: look at "
                "its nodes, where a process may hang in the kernel"
            )

    def _lines_until_next_query(self, tail: FollowedLines) -> Iterator[str]:
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
            found = job_state(_job(handle))
            if found.state == "waiting":
                cancel_job(_job(handle))
            if found.state == "ended" or self.clock() >= end:
                return found
            self.sleep(self.look_s)


def _job(handle: Handle) -> str:
    """Return the run's current job id: a job that Slurm would not requeue is resubmitted."""
    try:
        found = read_regular(JobFiles(handle.run).job, LONGEST_JOB).strip()
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

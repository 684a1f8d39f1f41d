"""The state of a job, read from squeue, sacct or scontrol, whichever knows it.

Uses only formats that are stable since 19.05: no JSON. An unknown state is no error, and a
Slurm that does not answer is not the end of a job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from composer_mesh.mesh.programs import FinishedProgram, ProgramFailed, run
from composer_mesh.services.launch.ports import LaunchFailed, State

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


def ask(job: str) -> JobState:
    """Return a job's current state. Raises `LaunchFailed` only if Slurm is not installed."""
    said = _run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r"])
    if line := _first_line(said.stdout):
        word, _, reason = line.partition("|")
        state = state_of(word)
        told = "" if reason in NO_REASONS or state != "waiting" else reason
        return JobState(state, word, told)
    if said.status and not FORGOTTEN.search(said.stderr):
        return JobState("unknown", f"squeue: {_first_line(said.stderr) or 'it did not answer'}")
    return _of_the_past(job)


def cancel(job: str) -> None:
    """Cancel a job at once; one that has ended is no error. Raises `LaunchFailed`."""
    _signal(["scancel", job])


def tell(job: str) -> None:
    """Send SIGTERM to the script of a job alone. Raises `LaunchFailed`."""
    _signal(["scancel", "--batch", "--signal=TERM", job])


def submit(command: Sequence[str]) -> str:
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


def _signal(command: Sequence[str]) -> None:
    said = _run(command)
    over = FORGOTTEN.search(said.stderr) or "already complet" in said.stderr
    if said.status and not over:
        raise LaunchFailed(f"{' '.join(command)} failed: {said.stderr.strip()}")


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

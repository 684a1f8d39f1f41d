"""Runs a program as the leader of a process group, and ends all that it started with whoever
started it.

    python -I -S program_group.py LIFELINE COMMAND...

LIFELINE is the reading end of a pipe that the starter holds open. The program and all its
descendants, also those in groups and sessions of their own, are killed when the program ends or
the pipe is closed, which the kernel does where the starter is killed. The exit status is the
program's. Imports nothing of ours, so that it starts in a few milliseconds.
"""

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127
IGNORED_BY_PYTHON = [signal.SIGPIPE, signal.SIGXFSZ]


def main(lifeline: int, command: list[str]) -> int:
    """Run a command to its end or that of the pipe; return its exit status."""
    os.set_inheritable(lifeline, False)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        leader = os.posix_spawnp(
            command[0], command, os.environ, setpgroup=0, setsigdef=IGNORED_BY_PYTHON
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return NOT_STARTED
    ends = select.poll()
    ends.register(lifeline, select.POLLIN)
    ends.register(os.pidfd_open(leader), select.POLLIN)
    ends.poll()
    os.killpg(leader, signal.SIGKILL)  # not waited for yet, so the group's number is still its own
    status = os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])
    end_orphans()
    return status


def end_orphans() -> None:
    """Kill all that the command left behind: the children of what is killed become ours."""
    with suppress(FileNotFoundError):  # a kernel that does not list them; the group has ended
        while orphans := children():
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def children() -> list[int]:
    """Return the processes of which this one is the parent."""
    own = os.getpid()
    with open(f"/proc/{own}/task/{own}/children") as listed:  # noqa: PTH123 starts faster
        return [int(pid) for pid in listed.read().split()]


def end_as(status: int) -> None:
    """Exit with a status, or by the signal that a negative one stands for."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):  # Python ignores or handles some others
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))

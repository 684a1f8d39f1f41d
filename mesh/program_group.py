"""Runs a program as the leader of a process group, and ends that group with whoever started it.

    python -I -S program_group.py LIFELINE COMMAND...

LIFELINE is the reading end of a pipe that the starter holds open. The group is killed when the
program ends or the pipe is closed, which the kernel does where the starter is killed. The exit
status is the program's. Imports nothing of ours, so that it starts in a few milliseconds.
"""

import os
import select
import signal
import sys

NOT_STARTED = 127
IGNORED_BY_PYTHON = [signal.SIGPIPE, signal.SIGXFSZ]


def main(lifeline: int, command: list[str]) -> int:
    """Run a command to its end or that of the pipe; return its exit status."""
    os.set_inheritable(lifeline, False)
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
    return os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])


def end_as(status: int) -> None:
    """Exit with a status, or by the signal that a negative one stands for."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):  # Python ignores or handles some others
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    end_as(main(int(sys.argv[1]), sys.argv[2:]))

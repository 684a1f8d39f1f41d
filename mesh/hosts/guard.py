"""A process that runs one program, and ends it with all that it started when its owner is gone.

The owner holds the other end of a pipe: closing it, or the end of the owner however it comes, ends
the program. It first has a moment to end by itself, as its input has ended too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence

from composer_mesh.mesh.hosts.process_lifetime import (
    adopt_orphans,
    end_as,
    end_descendants,
    end_with_parent,
)

GRACE_S = 1.0
NOT_STARTED = 127
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(life: int, command: Sequence[str], env: Mapping[str, str]) -> None:
    """Run the program; exits with its status. `life` is the descriptor that the owner keeps."""
    adopt_orphans()
    program = os.fork()
    if program == 0:
        _become(life, command, env)
    empty = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # only the program holds the owner's pipes
        os.dup2(empty, stream)
    ended = threading.Event()
    threading.Thread(target=_end_with, args=[life, ended], daemon=True).start()
    try:
        status = os.waitpid(program, 0)[1]
    except ChildProcessError:  # it was killed and reaped
        status = signal.SIGKILL
    ended.set()
    end_descendants()
    end_as(os.waitstatus_to_exitcode(status))


def _become(life: int, command: Sequence[str], env: Mapping[str, str]) -> None:
    end_with_parent()
    os.close(life)
    for ignored in IGNORED_BY_PYTHON:
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(env))
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(NOT_STARTED)


def _end_with(life: int, ended: threading.Event) -> None:
    os.read(life, 1)
    if not ended.wait(GRACE_S):
        end_descendants()

"""Runs a command about a run on its controller's host if that is another machine.

Processes, control sockets and loopback servers are reachable only there. The run's handle says how
to reach it with the cluster's own tools, so no further port is opened. A handle that this account
has not written is never used: what the run's files say is read here, and nothing else is done.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from composer_mesh.configs.cluster import ClusterKind
from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_module
from composer_mesh.services.directory.claim import RUNS
from composer_mesh.services.directory.status import (
    ENDED,
    RunUnavailable,
    newest_live_run,
    read_status,
)
from composer_mesh.services.launch.handle import THERE, HandleNotOurs, read_handle
from composer_mesh.services.launch.ports import Handle, Launcher, launcher_of

ABOUT_A_RUN = frozenset(
    [
        *("tree", "events", "stacks", "query", "tui", "scale", "stop", "join"),
        *("traces", "reward", "verify"),
    ]
)
OF_FILES = frozenset({"traces", "events", "verify"})
"""Commands that only read the run's directory, which they can do here too."""
NEWEST_BY_DEFAULT = frozenset({"tree", "events", "stacks", "tui"})
ENTER = 'cd "$1" && shift && exec "$@"'
SSH_FAILED = 255
ON_A_TERMINAL = {"ssh": (1, "-t"), "kubectl": (2, "-it")}
"""Programs that need an option for a terminal: its position and the option."""


def reached(
    arguments: argparse.Namespace,
    words: Sequence[str],
    launchers: Callable[[ClusterKind], Launcher] = launcher_of,
) -> int | None:
    """Run a command on its run's host and return the exit status; None if that is this host."""
    if arguments.command not in ABOUT_A_RUN or THERE in os.environ:
        return None
    named: Path | None = arguments.run
    run = named
    if named is None and arguments.command in NEWEST_BY_DEFAULT:
        run = newest_live_run(RUNS)
    if run is None or (handle := _usable(run, arguments.command)) is None:
        return None
    there = _renamed(words, run, handle.run) if named else [*words, str(handle.run)]
    try:
        return _forwarded(run, handle, launchers(handle.kind), there, arguments.command == "stop")
    except programs.ProgramFailed as failed:
        _not_reached(arguments, f"{run} cannot be reached: {failed}")
    except RunUnavailable as unavailable:
        _not_reached(arguments, str(unavailable))
    return None


def _usable(run: Path, command: str) -> Handle | None:
    """Return the handle with which a command is forwarded; None if it runs here."""
    try:
        return elsewhere(run)
    except HandleNotOurs as not_ours:
        if command not in OF_FILES:
            raise
        sys.stderr.write(f"composer-mesh: only the files here are read: {not_ours}\n")
        return None


def _forwarded(
    run: Path, handle: Handle, launcher: Launcher, words: Sequence[str], stops: bool
) -> int | None:
    prefix = launcher.reach(handle)
    if not prefix or not _runs(run, handle, launcher):
        return None
    if stops:
        launcher.stopping(handle)
    status = _run_there(run, handle, prefix, words)
    if stops and status == 0:
        launcher.stopped(handle)
    return status


def elsewhere(run: Path) -> Handle | None:
    """Return the handle of a run whose controller is not known to be here, None if it is.

    Raises RunUnavailable for a run that is live on another machine and was not launched.
    """
    status = read_status(run)
    if status is not None and status.host and status.here:
        return None
    if (handle := read_handle(run)) is not None:
        return handle
    if status is not None and not status.here and status.state not in ENDED:
        where = status.hostname or "another machine"
        raise RunUnavailable(
            f"the controller of {run} is on {where}, and {run} has no launch.json that says how "
            "to reach it: run this command there"
        )
    return None


def command_there(
    handle: Handle, prefix: Sequence[str], run: Path, words: Sequence[str], terminal: bool
) -> list[str]:
    """Return the local command that runs `composer-mesh WORDS` on the controller's host."""
    own = python_module("composer_mesh", *words, python=handle.python)
    inside = ["sh", "-c", ENTER, "sh", str(handle.folder), "env", f"{THERE}={run}", *own]
    reach = list(prefix)
    program = Path(reach[0]).name
    if terminal and program in ON_A_TERMINAL:
        place, word = ON_A_TERMINAL[program]
        reach.insert(place, word)
    if program == "ssh":  # it passes one string to a shell
        return [*reach, shlex.join(inside)]
    return [*reach, *inside]


def _runs(run: Path, handle: Handle, launcher: Launcher) -> bool:
    """Whether a controller is running; raises if it has not started yet."""
    state, word = launcher.state(handle)
    if state == "waiting":
        raise RunUnavailable(f"{run} has not begun, it waits for its hosts ({word})")
    return state != "ended"


def _run_there(run: Path, handle: Handle, prefix: Sequence[str], words: Sequence[str]) -> int:
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    command = command_there(handle, prefix, run, words, terminal)
    status = programs.attached(command)
    if status == SSH_FAILED and Path(command[0]).name == "ssh":
        raise RunUnavailable(
            f"the controller of {run} cannot be reached by {shlex.join(prefix[:4])}: its own "
            "words are above"
        )
    return status


def _not_reached(arguments: argparse.Namespace, why: str) -> None:
    """Raise unless the command is stop, which can also use the cluster."""
    if arguments.command != "stop":
        raise RunUnavailable(why)


def _renamed(words: Sequence[str], run: Path, there: Path) -> list[str]:
    """Return the arguments with the run's directory replaced by its path on the host."""
    place = next(n for n, word in enumerate(words) if n and Path(word) == run)
    return [*words[:place], str(there), *words[place + 1 :]]

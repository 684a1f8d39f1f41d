"""A launched run by its handle: its file, following it, and commands where its controller is.

The handle is in the run's directory as the launcher sees it; its paths are those on the
controller's host. Commands about the run are run with what it says, so it counts only if this
account's own `launch` wrote it (`signatures`), and each field has to be one that `launch` writes.

A command about a run runs on its controller's host if that is another machine: processes, control
sockets and loopback servers are reachable only there. It is reached with the cluster's own tools,
so no further port is opened.

ssh joins its arguments with spaces, and the user's remote shell parses them: so everything is
quoted here, and scripts of several commands run in `sh`, whatever that shell is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from composer_mesh.configs.cluster import ClusterKind, SshConfig
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import validated_json
from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import python_module
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.untrusted_json import MIB, short_reason
from composer_mesh.services.directory.claim import is_signed, sign
from composer_mesh.services.directory.resume import LAUNCH_FILE, THERE
from composer_mesh.services.directory.status import (
    ENDED,
    STATUS_FILE,
    RunUnavailable,
    commands_for,
    read_status,
)
from composer_mesh.services.launch.ports import Handle, Launcher, LaunchRefused, launcher_of
from composer_mesh.services.schedule.stopping import STOPPED

ABOUT_A_RUN = frozenset(
    [
        *("tree", "events", "stacks", "query", "tui", "scale", "stop", "join"),
        *("traces", "reward", "verify"),
    ]
)
OF_FILES = frozenset({"traces", "events", "verify"})
"""Commands that only read the run's directory, which they can do here too."""
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
    run: Path = arguments.run
    if (handle := _usable(run, arguments.command)) is None:
        return None
    there = _renamed(words, run, handle.run)
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
            "messages are above"
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


PATIENCE = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""ssh options: no password prompts, and broken connections are detected."""

DESTINATION = re.compile(r"(ssh://)?[A-Za-z0-9_\[][A-Za-z0-9_.@:%\[\]+-]{0,254}")
SWITCHES = frozenset({"-4", "-6", "-C", "-T", "-a", "-q", "-x"})
VALUES = frozenset({"-J", "-c", "-i", "-l", "-m", "-p"})
VALUE = re.compile(r"[^-\x00-\x1f][^\x00-\x1f]{0,1023}")
KEYS = frozenset(
    [
        *("addressfamily", "batchmode", "bindaddress", "certificatefile", "ciphers", "compression"),
        *("connectionattempts", "connecttimeout", "globalknownhostsfile", "hostkeyalgorithms"),
        *(
            "hostkeyalias",
            "hostname",
            "identitiesonly",
            "identityfile",
            "kexalgorithms",
            "loglevel",
        ),
        *("macs", "port", "preferredauthentications", "proxyjump", "pubkeyauthentication"),
        *("serveralivecountmax", "serveraliveinterval", "stricthostkeychecking", "tcpkeepalive"),
        *("user", "userknownhostsfile"),
    ]
)
"""Options of ssh that run no program, by `-o`; ssh ignores the case of their names."""


def to(destination: str, ssh: SshConfig) -> tuple[str, ...]:
    """Return the ssh prefix for a destination of a config."""
    return prefix(destination, ssh.options)


def prefix(destination: str, options: Sequence[str]) -> tuple[str, ...]:
    """Return the ssh prefix for a destination; the user's own options come first."""
    return ("ssh", *options, *PATIENCE, destination, "--")


def refuse_unstorable(destination: str, options: Sequence[str]) -> None:
    """Raise `LaunchRefused` for words of ssh that later commands would not use again."""
    if why := unstorable(destination, options):
        raise LaunchRefused(
            f"{why}, but commands about a running run use only hosts, and options of ssh that run "
            "no program: write it into ~/.ssh/config"
        )


def unstorable(destination: str, options: Sequence[str]) -> str:
    """Return which word is no host, or an option that may run a program; empty if none is."""
    if not DESTINATION.fullmatch(destination):
        return f"the ssh destination is {destination!r}"
    words = iter(options)
    for word in words:
        if word in SWITCHES:
            continue
        value = next(words, "")
        plain = bool(VALUE.fullmatch(value))
        key = re.split(r"[=\s]", value, maxsplit=1)[0].lower()
        if not plain or not (word in VALUES or (word == "-o" and key in KEYS)):
            return f"the options of ssh have {word} {value}".rstrip()
    return ""


def inside(folder: Path, command: Sequence[str]) -> str:
    """Return the shell text that runs a command in a folder."""
    return _sh(f"cd {shlex.quote(str(folder))} && exec {shlex.join(command)}")


def left_behind(folder: Path, command: Sequence[str], log: Path) -> str:
    """Return the shell text that starts a detached command and prints its process id.

    Its log, like all that it writes, is its user's alone.
    """
    return _sh(
        f"umask 077 && cd {shlex.quote(str(folder))} && "
        f"{{ nohup setsid {shlex.join(command)} </dev/null >>{shlex.quote(str(log))} 2>&1 & "
        "echo $!; }"
    )


def _sh(script: str) -> str:
    return shlex.join(["sh", "-c", script])


REPAIR = "restore it from a copy, or remove it if the run is on this machine"
JOBS = {
    "local": re.compile(r"\d{1,10}@(\d{1,20}|\?)"),
    "hosts": re.compile(r"\d{1,10}(@(\d{1,20}|\?))?"),
    "slurm": re.compile(r"\d{1,20}"),
    "kubernetes": re.compile(r"[a-z0-9]([a-z0-9-]{0,251}[a-z0-9])?"),
}
"""What each kind of cluster calls a run."""
ANY_JOB = re.compile(r"[ -~]{1,256}")


class HandleNotOurs(RunUnavailable):
    """A `launch.json` that this account's `launch` did not write, so nothing of it is run."""


def write_handle(place: Path, handle: Handle) -> None:
    """Write a handle to the run's directory atomically, signed by this account."""
    content = (json.dumps(asdict(handle), indent=1, default=str) + "\n").encode()
    write_whole(place / LAUNCH_FILE, content)
    sign(place / LAUNCH_FILE, content)


def read_handle(place: Path) -> Handle | None:
    """Return the handle of a run, None if it was not launched.

    Raises `HandleNotOurs` for one that this account has not launched, `RunUnavailable` for one that
    cannot be read.
    """
    file = place / LAUNCH_FILE
    try:
        content = read_regular(file, MIB)
        if not is_signed(file, content):
            raise HandleNotOurs(
                f"{file} was not written by composer-mesh launch of this account, so no command "
                f"is run with what it says: look at the run from the account and the machine that "
                f"launched it, or {REPAIR}"
            )
        handle = validated_json(Handle, content)
        _check_kind(handle)
        return handle
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = short_reason(error)
        raise RunUnavailable(f"{file} says no more where the run is ({why}): {REPAIR}") from None


def _check_kind(handle: Handle) -> None:
    """Raise ValueError for a field that `launch` writes of no run of this kind."""
    if not JOBS.get(handle.kind, ANY_JOB).fullmatch(handle.job):
        raise ValueError(f"job is {handle.job[:80]!r}, which is not a job of {handle.kind}")
    if handle.destination and (why := unstorable(handle.destination, handle.options)):
        raise ValueError(why)


def hints(place: Path, handle: Handle, telemetry: bool) -> list[str]:
    """Return the command lines that a user may need for a launched run."""
    resume = ["composer-mesh", "launch", str(place / "launch" / "config.toml")]
    lines = [
        *commands_for(place, telemetry),
        f"{shlex.join([*resume, '--output', str(place), '--resume'])}   # when it was stopped",
    ]
    if handle.log is not None:
        lines.append(f"tail -F {shlex.quote(str(handle.log))}")
    return lines


FAILED, INTERRUPTED = 1, 130
STATUSES = {"finished": 0, "stopped": STOPPED, "failed": FAILED}
"""Exit statuses by the controller's final state."""
GOOD_WORDS = frozenset({"completed", "succeeded"})
"""Cluster states of successful jobs, used if the run's status is not readable from here."""


def follow(launcher: Launcher, handle: Handle, place: Path) -> int:
    """Print the controller's output until the run has ended; return its exit status.

    Ctrl-C only stops following.
    """
    try:
        for line in launcher.follow(handle):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(
            "\ncomposer-mesh: its output is no longer followed, and the run continues: end it with "
            f"composer-mesh stop {shlex.quote(str(place))}\n"
        )
        return INTERRUPTED
    return outcome(launcher, handle, place)


def outcome(launcher: Launcher, handle: Handle, place: Path) -> int:
    """Return the exit status of a run that was launched last from `place`."""
    status = read_status(place)
    if status is not None and is_newer(place / STATUS_FILE, place / LAUNCH_FILE):
        return STATUSES.get(status.state, FAILED)  # if killed, the status still says running
    word = launcher.state(handle)[1].lower()
    return 0 if GOOD_WORDS & set(word.split()) else FAILED


def is_newer(one: Path, other: Path) -> bool:
    """Whether a file was written after another one, or at the same time."""
    return one.stat().st_mtime >= other.stat().st_mtime

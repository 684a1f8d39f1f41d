"""The handle file of a launched run, and the commands that its user can enter.

It is in the run's directory as the launcher sees it; its paths are those on the controller's host.
Commands about the run are run with what it says, so it counts only if this account's own `launch`
wrote it (`signatures`), and each field has to be one that `launch` writes.

Follows a launched run: its controller's output and exit status.

The words of ssh: which of them may be stored, and commands quoted for the remote shell.

ssh joins its arguments with spaces, and the user's remote shell parses them: so everything is
quoted here, and scripts of several commands run in `sh`, whatever that shell is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from composer_mesh.configs.cluster import SshConfig
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import validated_json
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.untrusted_json import MIB, short_reason
from composer_mesh.services.directory.claim import is_signed, sign
from composer_mesh.services.directory.status import (
    STATUS_FILE,
    RunUnavailable,
    commands_for,
    read_status,
)
from composer_mesh.services.launch.ports import Handle, Launcher, LaunchRefused
from composer_mesh.services.schedule.stopping import STOPPED

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


LAUNCH_FILE = "launch.json"
THERE = "COMPOSER_MESH_REACHED"
"""Environment variable of a command forwarded to the controller: the user's path of the run."""
REPAIR = "put it back from a copy, or remove it where the run is on this machine"
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
        raise ValueError(f"job is {handle.job[:80]!r}, which is none of {handle.kind}")
    if handle.destination and (why := unstorable(handle.destination, handle.options)):
        raise ValueError(why)


def called(run: Path) -> Path:
    """Return the user's path of a run, which may be on another machine than this process."""
    return Path(os.environ.get(THERE) or run)


def resume_command(run: Path) -> str:
    """Return the command line that resumes a stopped run."""
    place, program, config = called(run), "train", "config.toml"
    if (run / LAUNCH_FILE).exists() or THERE in os.environ:
        program, config = "launch", "launch/config.toml"
    words = ["composer-mesh", program, str(place / config), "--output", str(place), "--resume"]
    return shlex.join(words)


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
            "\ncomposer-mesh: not followed any more, and the run goes on: end it with "
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

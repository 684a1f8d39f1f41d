"""The words of ssh: which of them may be stored, and commands quoted for the remote shell.

ssh joins its arguments with spaces, and the user's remote shell parses them: so everything is
quoted here, and scripts of several commands run in `sh`, whatever that shell is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.configs.cluster import SshConfig
from composer_mesh.services.launch.ports import LaunchRefused

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

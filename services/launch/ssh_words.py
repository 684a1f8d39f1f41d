"""Quotes commands for ssh, which passes one string to a remote shell.

ssh joins its arguments with spaces, and the user's remote shell parses them: so everything is
quoted here, and scripts of several commands run in `sh`, whatever that shell is.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.configs.cluster import SshConfig

PATIENCE = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""ssh options: no password prompts, and broken connections are detected."""


def to(destination: str, ssh: SshConfig) -> tuple[str, ...]:
    """Return the ssh prefix for a destination; the user's own options come first."""
    return ("ssh", *ssh.options, *PATIENCE, destination, "--")


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

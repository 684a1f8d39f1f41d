"""How a command becomes the one text that ssh hands to a shell on the other side.

ssh joins its arguments with blanks, and the user's shell there reads them: so everything is quoted
here, and what needs more than one command is left to `sh`, whatever that shell is.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from composer_mesh.configs.cluster import SshConfig

PATIENCE = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""Nobody is asked for a password, and a line that is cut is noticed."""


def to(destination: str, ssh: SshConfig) -> tuple[str, ...]:
    """What is put before a text to run it at a destination; the user's own options come first."""
    return ("ssh", *ssh.options, *PATIENCE, destination, "--")


def inside(folder: Path, command: Sequence[str]) -> str:
    """The text that runs a command in a folder."""
    return _sh(f"cd {shlex.quote(str(folder))} && exec {shlex.join(command)}")


def left_behind(folder: Path, command: Sequence[str], log: Path) -> str:
    """The text that starts a command in a session of its own and prints its process id."""
    return _sh(
        f"cd {shlex.quote(str(folder))} && "
        f"{{ nohup setsid {shlex.join(command)} </dev/null >>{shlex.quote(str(log))} 2>&1 & "
        "echo $!; }"
    )


def _sh(script: str) -> str:
    return shlex.join(["sh", "-c", script])

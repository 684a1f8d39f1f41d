"""The only place that runs other programs: ssh, sbatch, kubectl; and our own, detached.

Arguments are always lists and never pass a shell of this machine. What they mean is not known here.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RUN_S = 60.0


class ProgramFailed(RuntimeError):
    """A program is missing, did not end in time or ended with an error: its own words."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(tuple(command), said)
        self.command, self.said = tuple(command), said

    def __str__(self) -> str:
        return f"{shlex.join(self.command[:4])} failed: {self.said.strip() or 'it said nothing'}"


@dataclass(frozen=True)
class Done:
    """A program that has ended."""

    status: int
    stdout: str
    stderr: str


def run(
    command: Sequence[str],
    *,
    text: str | None = None,
    deadline_s: float = RUN_S,
    check: bool = True,
    folder: Path | None = None,
) -> Done:
    """Run a program to its end; `text` is its input. Raises `ProgramFailed`."""
    try:
        done = subprocess.run(
            list(command),
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            cwd=folder,
            check=False,
        )
    except FileNotFoundError:
        raise ProgramFailed(command, "it is not installed here, or not on PATH") from None
    except subprocess.TimeoutExpired:
        raise ProgramFailed(command, f"it did not end within {deadline_s:g} s") from None
    if check and done.returncode:
        raise ProgramFailed(command, done.stderr or done.stdout)
    return Done(done.returncode, done.stdout, done.stderr)


def attached(command: Sequence[str]) -> int:
    """Run a program on this terminal to its end; its exit status."""
    try:
        return subprocess.run(list(command), check=False).returncode
    except FileNotFoundError:
        raise ProgramFailed(command, "it is not installed here, or not on PATH") from None


def lines(command: Sequence[str]) -> Iterator[str]:
    """The lines that a program prints, as they come; who stops reading ends it."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise ProgramFailed(command, "it is not installed here, or not on PATH") from None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield line.rstrip("\n")
    finally:
        process.stdout.close()
        process.kill()
        process.wait()


def beside(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Start a program that ends with this process, which collects it; its process id.

    It shares the streams, and leads a group, so that Ctrl-C is a message to this process alone.
    """
    process = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, env=dict(env), process_group=0
    )
    _left.append(process)  # Popen would collect it behind our back
    return process.pid


def detached(
    command: Sequence[str],
    log: Path,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a program in a session of its own that outlives this process; its process id.

    Both of its streams are appended to `log`.
    """
    try:
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                env=None if env is None else dict(env),
                start_new_session=True,
            )
    except FileNotFoundError:
        raise ProgramFailed(command, "it is not installed here, or not on PATH") from None
    _left.append(process)
    return process.pid


_left: list[subprocess.Popen[bytes]] = []
"""Programs that this module does not wait for: they outlive this process, or it does so itself."""

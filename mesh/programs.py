"""The only module that runs other programs: ssh, sbatch, kubectl; and our own, detached.

Arguments are always lists and never pass a shell of this machine.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RUN_S = 60.0


class ProgramFailed(RuntimeError):
    """A program is missing, did not end in time or failed, with its output."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(tuple(command), said)
        self.command, self.said = tuple(command), said

    def __str__(self) -> str:
        return f"{shlex.join(self.command[:4])} failed: {self.said.strip() or 'it said nothing'}"


@dataclass(frozen=True)
class Done:
    """Result of a finished program."""

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
    """Run a program on this terminal to its end; return its exit status."""
    try:
        return subprocess.run(list(command), check=False).returncode
    except FileNotFoundError:
        raise ProgramFailed(command, "it is not installed here, or not on PATH") from None


def lines(command: Sequence[str]) -> Iterator[str]:
    """Yield a program's output lines as they arrive; closing the iterator kills the program."""
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


def beside(command: Sequence[str], env: Mapping[str, str], pass_fds: Collection[int] = ()) -> int:
    """Start a program that ends with this process and is reaped by it; return its pid.

    It shares the streams, and leads a process group, so that only this process receives Ctrl-C.
    """
    process = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, env=dict(env), process_group=0, pass_fds=pass_fds
    )
    _left.append(process)  # keeps Popen from reaping it first
    return process.pid


def reap(pid: int) -> None:
    """Wait for the end of a program that was started by `beside`, or is about to end."""
    for process in [one for one in _left if one.pid == pid]:
        process.wait()
        _left.remove(process)


def detached(
    command: Sequence[str],
    log: Path,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a program in its own session that outlives this process; return its pid.

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
"""Programs that this module does not wait for: they outlive this process, or it reaps them."""

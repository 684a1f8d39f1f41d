"""The only module that runs other programs: ssh, sbatch, kubectl; and our own, detached.

Arguments are always lists and never pass a shell of this machine.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from composer_mesh.mesh.environment import python_code
from composer_mesh.mesh.open_folder import OpenFolder

RUN_S = 60.0
MOST_ANSWER_BYTES = 1 << 25
PACKAGES = Path(__file__).parents[2]
GUARD = (
    "import os, sys; env = dict(os.environ); sys.path.insert(0, sys.argv[1]); "
    "from composer_mesh.mesh.hosts.guard import main; main(int(sys.argv[2]), sys.argv[3:], env)"
)
"""Starts the guard of a program, which gets the environment as it was before our imports."""


class ProgramFailed(RuntimeError):
    """A program is missing, did not end in time or failed, with its output."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(tuple(command), said)
        self.command, self.said = tuple(command), said

    def __str__(self) -> str:
        return f"{shlex.join(self.command[:4])} failed: {self.said.strip() or 'it said nothing'}"


class ProgramNotStarted(ProgramFailed):
    """A program is missing, or the system refused to start it."""


@dataclass(frozen=True)
class FinishedProgram:
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
) -> FinishedProgram:
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
        if folder is not None and not folder.is_dir():
            raise ProgramNotStarted(command, f"the folder {folder} does not exist") from None
        raise ProgramNotStarted(command, "it is not installed here, or not on PATH") from None
    except OSError as refused:
        raise ProgramNotStarted(command, f"it cannot be started: {refused.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ProgramFailed(command, f"it did not end within {deadline_s:g} s") from None
    if check and done.returncode:
        raise ProgramFailed(command, done.stderr or done.stdout)
    return FinishedProgram(done.returncode, done.stdout, done.stderr)


class AnsweringProgram:
    """A program that answers each line of its input with one line, until it is closed.

    It ends with this process, because its input ends then. One that is late, ends or answers
    without end is killed, and `ProgramFailed` is raised. What it writes to its error stream is
    kept for that error, or with `shows_errors` written to the stream of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        shows_errors: bool = False,
        pass_fds: Collection[int] = (),
    ) -> None:
        self._command, self._errors = command, tempfile.TemporaryFile()  # noqa: SIM115 see close
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else self._errors,
            env=dict(env),
            process_group=0,
            pass_fds=pass_fds,
        )

    def ask(self, line: bytes, deadline_s: float, most_bytes: int = MOST_ANSWER_BYTES) -> bytes:
        """Return the answer to a line. Waits for it, at most until the deadline."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._failed("it has ended") from None
        return self._answer(time.monotonic() + deadline_s, most_bytes)

    def close(self) -> None:
        """Kill the program, whatever it does."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()
        self._process.wait()
        self._errors.close()

    def _answer(self, until: float, most_bytes: int) -> bytes:
        assert self._process.stdout is not None
        found, source = bytearray(), self._process.stdout.fileno()
        waiting = select.poll()
        waiting.register(source, select.POLLIN)
        while not found.endswith(b"\n"):
            if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
                raise self._failed("it did not answer in time")
            piece = os.read(source, 1 << 16)
            found += piece
            if not piece or len(found) > most_bytes:
                raise self._failed("its answer is too long" if piece else "it has ended")
        return bytes(found)

    def _failed(self, why: str) -> ProgramFailed:
        """End the program; return the error, with the last line that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._process.poll() is None else None)
        self._process.kill()
        status = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        said = self._errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        return ProgramFailed(self._command, f"{why}, {how}{': ' * bool(said)}{said}")


class TiedProgram:
    """A program with three pipes that ends, with all that it started, when it is closed.

    It also ends when this process ends, killed or not: `hosts.guard` runs it.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path | None) -> None:
        """Start it with exactly this environment; raises `ProgramFailed`."""
        if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
            raise ProgramNotStarted(command, "it is not installed here, or not on PATH")
        life, self._life = os.pipe()
        guard = python_code(GUARD, str(PACKAGES), str(life), *command)
        try:
            self._process = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(env),
                cwd=folder,
                process_group=0,
                pass_fds=(life,),
            )
        except OSError as error:
            os.close(self._life)
            raise ProgramNotStarted(command, f"it cannot be started: {error.strerror}") from None
        finally:
            os.close(life)
        self.pid = self._process.pid
        """The process id of the guard, which is the program's parent."""

    @property
    def streams(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        """Its input, output and error stream."""
        own = self._process
        assert own.stdin is not None
        assert own.stdout is not None
        assert own.stderr is not None
        return own.stdin, own.stdout, own.stderr

    def finish(self, text: str) -> FinishedProgram:
        """Return its result for an input. Waits for its end, and that of all that it started."""
        said, errors = self._process.communicate(text.encode())
        return FinishedProgram(
            self._process.returncode,
            said.decode("utf-8", "replace"),
            errors.decode("utf-8", "replace"),
        )

    def close(self) -> None:
        """End it; does not wait."""
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        return self._process.wait()

    def ends_within(self, grace_s: float) -> bool:
        """Wait for its end so many seconds; return whether it has come."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            return False
        return True


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


def start_tied(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Collection[int] = ()
) -> int:
    """Start a program that ends with this process and is reaped by it; return its pid.

    It shares the streams, and leads a process group, so that only this process receives Ctrl-C.
    """
    process = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, env=dict(env), process_group=0, pass_fds=pass_fds
    )
    _left.append(process)  # keeps Popen from reaping it first
    return process.pid


def reap(pid: int) -> int | None:
    """Wait for the end of a program that this process started; return its exit status, once."""
    for process in [one for one in _left if one.pid == pid]:
        _left.remove(process)
        return process.wait()
    return None


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
        with OpenFolder(log.parent) as above, above.append(log.name) as out:
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

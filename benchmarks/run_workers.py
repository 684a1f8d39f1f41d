"""Starts workers of a run as a user would: the real command, each in its own session."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from composer_mesh.mesh.processes import descendants, is_alive

LISTEN_DEADLINE_S = 60.0
LISTENS = re.compile(r"listens on (\S+)$", re.MULTILINE)
LOOK_S = 0.02


@dataclass
class Worker:
    """A `worker` command and its output."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    address: str = ""
    known: set[int] = field(default_factory=set)

    def family(self) -> set[int]:
        """Return its process and all descendants ever seen that are still alive."""
        self.process.poll()
        self.known |= {self.process.pid, *descendants(self.process.pid)}
        self.known = {pid for pid in self.known if is_alive(pid)}  # a pid may be reused
        return set(self.known)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of them, including those started meanwhile."""
        signalled: set[int] = set()
        while fresh := self.family() - signalled:
            for pid in sorted(fresh):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled |= fresh

    def kill(self) -> None:
        """SIGKILL the worker and all its processes, like a power failure of the host."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def until_gone(self, deadline_s: float) -> None:
        """Wait until no process of it is left. Raises `TimeoutError`."""
        end = time.monotonic() + deadline_s
        while left := self.family():
            if time.monotonic() > end:
                raise TimeoutError(f"of worker {self.name} {left} are left after {deadline_s:g} s")
            time.sleep(LOOK_S)

    def until_it_listens(self) -> None:
        """Wait until it reports its address; raises `RuntimeError` with its output otherwise."""
        end = time.monotonic() + LISTEN_DEADLINE_S
        while (found := LISTENS.search(self.log.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"worker {self.name} does not listen: {self.log.read_text()}")
            time.sleep(LOOK_S)
        self.address = found.group(1)


def start_worker(
    folder: Path,
    name: str,
    authority: Path,
    *options: str,
    within: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Worker:
    """Start a worker; `within` is put before its command. Never blocks."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "composer_mesh", "worker", "--name", name]
    command = [*within, *command, "--authority", str(authority), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    return Worker(name, process, log)


@contextmanager
def worker(
    folder: Path,
    name: str,
    authority: Path,
    *options: str,
    within: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Yield a listening worker; it and all its processes are killed at the end of the block."""
    one = start_worker(folder, name, authority, *options, within=within, env=env)
    try:
        one.until_it_listens()
        yield one
    finally:
        one.kill()

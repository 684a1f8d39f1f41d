"""Workers of a run as a user starts them, each the real command in a session of its own."""

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
    """A `worker` command and what it said."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    address: str = ""
    known: set[int] = field(default_factory=set)

    def family(self) -> set[int]:
        """It and everything it has started, as far as that was ever seen, that is still there."""
        self.process.poll()
        self.known |= {self.process.pid, *descendants(self.process.pid)}
        self.known = {pid for pid in self.known if is_alive(pid)}  # a number may come again
        return set(self.known)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all of them, until it has reached those that were born meanwhile."""
        told: set[int] = set()
        while fresh := self.family() - told:
            for pid in sorted(fresh):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= fresh

    def kill(self) -> None:
        """SIGKILL to the worker and to what serves for it: a host that loses its power."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def until_gone(self, deadline_s: float) -> None:
        """Wait until nothing of it is left. Raises `TimeoutError`."""
        end = time.monotonic() + deadline_s
        while left := self.family():
            if time.monotonic() > end:
                raise TimeoutError(f"of worker {self.name} {left} are left after {deadline_s:g} s")
            time.sleep(LOOK_S)

    def until_it_listens(self) -> None:
        """Wait until it has said where. Raises `RuntimeError` with its words where it does not."""
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
    """Start a worker; `within` is put before its command. Waits for nothing."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "composer_mesh", "worker", "--name", name]
    command = [*within, *command, "--authority", str(authority), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    return Worker(name, process, log)


@contextmanager
def worker(
    folder: Path, name: str, authority: Path, *options: str, within: Sequence[str] = ()
) -> Iterator[Worker]:
    """A worker that listens; it and all that it runs are killed at the end of the block."""
    one = start_worker(folder, name, authority, *options, within=within)
    try:
        one.until_it_listens()
        yield one
    finally:
        one.kill()

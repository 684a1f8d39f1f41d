"""The command `composer-mesh worker`: offers this host to a run, and cleans it up afterwards.

    worker  (this process: without Monarch, never blocked)
    └── serve   (Monarch's host: listens, starts processes)
        ├── the host's agent, which receives beats and renews the lease
        └── the actors of the run

Access to the port allows code execution, so it is bound to an address that only the hosts of a run
reach, and TLS admits only certificates of its authority. When the controller releases the host, or
is silent for the duration of the lease, all processes of the run are ended, whatever their state.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from composer_mesh.mesh import programs
from composer_mesh.mesh.environment import PRIVATE_UMASK, python_module, set_umask
from composer_mesh.mesh.hosts import address as addresses
from composer_mesh.mesh.hosts.certificates import tls_environment
from composer_mesh.mesh.hosts.process_lifetime import adopt_orphans, collect, end_descendants
from composer_mesh.mesh.hosts.roster import Lease, Record, announce, read_record, withdraw
from composer_mesh.mesh.hosts.serve import FOLDER
from composer_mesh.mesh.machine import this_host
from composer_mesh.mesh.private_folder import own_private_folder
from composer_mesh.mesh.processes import is_alive

AUTO = "auto"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""As in `[[placement.hosts]]`; it is part of a file name."""
LOOK_S = 0.1
LISTEN_S = 60.0
ENDED, LEFT_ALONE = 0, 1


class WorkerRefused(Exception):
    """A worker cannot be started with these options: the value, the bound and the repair."""


@dataclass(frozen=True)
class WorkerOptions:
    """Command-line options of a worker.

    `lease_s` is how long it continues without its controller, `wait_s` how long it waits for one;
    `with_process` is a local process with which it ends.
    """

    listen: str = "tls://auto:0"
    name: str = ""
    roster: Path | None = None
    authority: Path | None = None
    lease_s: float = 15.0
    wait_s: float = 600.0
    with_process: int | None = None
    subnets: tuple[str, ...] = ()
    any_address: bool = False


def worker_command(options: WorkerOptions) -> int:
    """Serve one run. The status is 0 when the run released the host or SIGTERM ended it.

    It is 1 when no controller came, when the controller was lost, or when serving failed.
    """
    set_umask(PRIVATE_UMASK)
    folder = Path(tempfile.mkdtemp(prefix="worker-", dir=own_private_folder()))
    try:
        return _Worker(options, folder).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Worker:
    options: WorkerOptions
    folder: Path
    clock: Callable[[], float] = time.monotonic
    _signals: list[int] = field(default_factory=list)

    def serve(self) -> int:
        name = self.options.name or socket.gethostname().partition(".")[0]
        if not NAME.fullmatch(name):
            raise WorkerRefused(
                f"--name {name!r} is not a name of a host, which is made of letters, digits, dots, "
                "dashes and underscores: name it as placement.hosts does"
            )
        address = self._address(name)
        env = self._environment(address)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signals.append(number))
        adopt_orphans()
        program = python_module("composer_mesh.mesh.hosts.serve", address)
        serving = programs.start_tied(program, env)
        try:
            return self._look_after(serving, name, address)
        finally:
            self._leave_nothing(name)

    def _look_after(self, serving: int, name: str, address: str) -> int:
        if (why := self._until_it_listens(serving, address)) is not None:
            return self._say(name, why, LEFT_ALONE)
        record = Record(name, address, sys.executable, os.getpid(), this_host())
        with self._announced(record):
            _write(sys.stdout, f"{name} listens on {addresses.channel_of(address)}")
            return self._say(name, *self._until_it_ends(serving))

    def _until_it_listens(self, serving: int, address: str) -> str | None:
        """Wait until the port accepts connections; return why it does not, or None."""
        _, host, port = addresses.split(address)
        end = self.clock() + LISTEN_S
        while self.clock() < end and not self._signals:
            if serving in collect():
                return "it could not serve: its own messages are above"
            with contextlib.suppress(OSError), socket.create_connection((host, port), LOOK_S):
                return None
            time.sleep(LOOK_S)
        return "a signal ended it" if self._signals else f"it did not listen within {LISTEN_S:g} s"

    def _until_it_ends(self, serving: int) -> tuple[str, int]:
        """Wait for the end; return its reason and exit status."""
        lease, began, options = Lease(self.folder), self.clock(), self.options
        while True:
            if self._signals:
                return f"ended by {signal.Signals(self._signals[0]).name}", ENDED
            if lease.ended:
                return "the run gave this host back", ENDED
            if serving in collect():
                return "it stopped serving", LEFT_ALONE
            if options.with_process is not None and not is_alive(options.with_process):
                return f"process {options.with_process} is gone", LEFT_ALONE
            age = lease.age_s()
            if age is None and self.clock() - began > options.wait_s:
                return f"no controller came within {options.wait_s:g} s", LEFT_ALONE
            if age is not None and age > options.lease_s:
                return f"the controller was silent for {options.lease_s:g} s", LEFT_ALONE
            time.sleep(LOOK_S)

    @contextlib.contextmanager
    def _announced(self, record: Record) -> Iterator[None]:
        """Announce the worker on the roster, if there is one, while the block runs."""
        roster = self.options.roster
        if roster is not None:
            announce(roster, record)
        try:
            yield
        finally:
            if roster is not None:
                with contextlib.suppress(OSError):
                    withdraw(roster, record)

    def _address(self, name: str) -> str:
        """Return the process address; a port on which this name was announced is not reused.

        Monarch cannot attach twice to one address, so a restarted worker must have another.
        """
        options = self.options
        scheme, host, port = addresses.split(options.listen)
        if host == AUTO:
            host = addresses.own_address(scheme, options.subnets)
        addresses.check_listen(
            addresses.join(scheme, host, port), options.subnets, options.any_address
        )
        known = None if options.roster is None else read_record(options.roster, name)
        if port == 0:
            port = addresses.free_port(host)
        elif known is not None and addresses.split(known.address)[:2] == (scheme, host):
            port = max(port, addresses.split(known.address)[2] + 1)
        identity, at, _ = options.listen.rpartition("@")
        return addresses.process_address(identity + at + addresses.join(scheme, host, port))

    def _environment(self, address: str) -> Mapping[str, str]:
        """Return the environment of all processes started here, with a new key for TLS."""
        scheme, host, _ = addresses.split(address)
        env = {**os.environ, FOLDER: str(self.folder)}
        if scheme != "tls":
            return env
        if self.options.authority is None:
            raise WorkerRefused(
                f"--listen {address} requires TLS but --authority is not given, so members could "
                "not prove who they are: pass the folder with ca.pem and ca.key of the run"
            )
        own = self.folder / "tls"
        return env | tls_environment(self.options.authority, own, [host])

    def _leave_nothing(self, name: str) -> None:
        if left := end_descendants():
            _write(sys.stderr, f"{name}: processes {left} do not end")

    def _say(self, name: str, why: str, status: int) -> int:
        _write(sys.stdout if status == ENDED else sys.stderr, f"{name}: {why}")
        return status


def _write(stream: TextIO, words: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # its starter may have closed the pipe
        stream.write(f"composer-mesh worker {words}\n")
        stream.flush()

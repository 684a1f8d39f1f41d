"""Status file of a run: the controller's current state for outside observers.

One small JSON object, replaced atomically, without history. Whoever reads it checks every field,
because the file may be a stranger's.

Lookup of the live run that a command inspects.

It reads the run's status file and directory lock, without contacting any process.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.machine import NAME, this_host
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.untrusted_json import MIB
from composer_mesh.services.directory.claim import RUNS, locker

STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
MOST = 16 * MIB
"""Size in bytes of the largest status file that is read."""
ENDED = frozenset({"finished", "stopped", "failed"})

Pid = Annotated[int, Field(ge=1, le=2**22)]
"""A process id; Linux has none above this."""
Loopback = Annotated[str, Field(pattern=r"^https?://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5}$")]
"""Address of a server of the run: all of them listen on the loopback interface of its host."""
File = Annotated[str, Field(pattern=r"^[^\x00]{1,4096}$")]
TlsNames = Annotated[str, Field(pattern=r"^(certificate|key|authority)$")]


@dataclass(frozen=True)
class ActorStatus:
    """Status of one actor as reported by the controller.

    `pid` is None until its process starts; `outstanding` is the number of calls in flight from the
    controller, None if they are not counted. `host` is None or `localhost` for the controller's own
    machine; a remote host reports the resources of its processes itself.
    """

    name: str
    kind: str
    pid: Pid | None
    state: str = "ready"
    policy_version: int | None = None
    activity: str = ""
    restarts: int = 0
    outstanding: int | None = None
    host: str | None = None
    rss_bytes: int | None = None
    cpu_percent: float | None = None

    @property
    def with_controller(self) -> bool:
        """Whether its process is on the controller's machine."""
        return self.host in (None, NAME)


@dataclass(frozen=True)
class RunStatus:
    """Current status of a run; `state` is a phase of the controller, or one of `ENDED`.

    `host` identifies the controller's machine and container (`mesh.machine.this_host`), `hostname`
    is its name. `wall_s` and `restarts` are those of all `sessions`, the starts of the run so far.
    `admin_tls` holds the paths of the fields of `mesh.admin.TlsFiles`, if the admin
    server requires a certificate. `hosts` maps Monarch addresses to the run's names for hosts.
    """

    pid: Pid
    admin_url: Loopback | None
    state: str
    step: int
    steps: int
    policy_version: int
    transport: str
    actors: tuple[ActorStatus, ...] = ()
    restarts: int = 0
    sessions: int = 1
    wall_s: float = 0.0
    telemetry_socket: str | None = None
    host: str = ""
    hostname: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    admin_tls: Mapping[TlsNames, File] = field(default_factory=dict)

    @property
    def here(self) -> bool:
        """Whether its controller is on this machine and in this container."""
        return not self.host or self.host == this_host()

    @property
    def live(self) -> bool:
        """Whether the run is live: its state is not an ended one, and its process exists.

        For a process on another machine only its state is checked.
        """
        return self.state not in ENDED and (not self.here or is_alive(self.pid))


class RunProgress(NamedTuple):
    """How far a run is: steps done, replaced processes, sessions, and seconds of all of them."""

    step: int = 0
    restarts: int = 0
    sessions: int = 0
    wall_s: float = 0.0


def earlier_progress(run: Path) -> RunProgress:
    """Return the progress that the last session of a run wrote; zeros without a status.

    A killed session wrote it about 2 s before its end, or less.
    """
    status = read_status(run)
    if status is None:
        return RunProgress()
    return RunProgress(status.step, status.restarts, status.sessions, status.wall_s)


_STATUS = fail_fast(RunStatus)


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the status file atomically; `path` is the run directory or the file in it."""
    path = _file(path)
    content = json.dumps(dataclasses.asdict(status), indent=1) + "\n"
    with OpenFolder(path.parent) as folder:
        folder.write_whole(path.name, content.encode(), synced=False)


def read_status(path: Path) -> RunStatus | None:
    """Read the status in a run directory; None if there is none or it is unreadable."""
    try:
        return _STATUS.validate_json(read_regular(_file(path), MOST))
    except (OSError, ValueError):
        return None


def newest_run(runs: Path) -> Path | None:
    """Return the newest run directory under `runs`, live ones first, including ablations."""
    names = (STATUS_FILE, EVENTS_FILE)
    found = [*chain(*(runs.glob(f"{depth}/{name}") for name in names for depth in ("*", "*/*/*")))]
    folders = list(dict.fromkeys(one.parent for one in sorted(found, key=_modified, reverse=True)))
    return next((one for one in folders if is_live(one)), next(iter(folders), None))


def is_live(run: Path) -> bool:
    """Return whether the status of a run directory is that of a live run."""
    status = read_status(run)
    return status is not None and status.live


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _file(path: Path) -> Path:
    return path if path.suffix == ".json" else path / STATUS_FILE


class RunUnavailable(Exception):
    """A run cannot serve the request now; the message says why and what to do about it."""


class NotRunning(RunUnavailable):
    """A command needs a live run, and this one is not; `run` is its directory."""

    def __init__(self, run: Path, message: str) -> None:
        super().__init__(message)
        self.run = run


def live_run(run: Path) -> Path:
    """Return a run directory; raise NotRunning if its run is not live."""
    if is_live(run):
        return run
    if goes_on(run):
        raise NotRunning(run, f"{run} is starting: try again in a moment")
    if (run / STATUS_FILE).exists() or (run / EVENTS_FILE).exists():
        raise NotRunning(run, f"{run} is not running")
    raise NotRunning(
        run,
        f"{run} holds no run: name the directory of one, or start one with "
        f"composer-mesh train CONFIG --output {shlex.quote(str(run))}",
    )


def run_or_newest(run: Path | None) -> Path:
    """Return the named run directory, or the newest one; raise RunUnavailable without any."""
    if (found := newest_run(RUNS) if run is None else run) is not None:
        return found
    raise RunUnavailable(
        f"{RUNS}/ holds no run: name the directory of one, or start one with "
        "composer-mesh train CONFIG"
    )


def commands_for(run: Path, telemetry: bool) -> list[str]:
    """Return the commands that inspect a run from a second terminal."""
    place = shlex.quote(str(run))
    looks = [
        f"composer-mesh tree {place} --watch",
        f"composer-mesh events {place} --follow",
        f"composer-mesh scale {place} generator=N",
        f"composer-mesh stop {place}",
        f"composer-mesh stacks {place}",
        f"composer-mesh tui {place}",
    ]
    query = f'composer-mesh query {place} "SELECT * FROM actors"'
    return [*looks, query] if telemetry else looks


def status_of(run: Path) -> RunStatus:
    """Return the last status that the controller wrote; raise RunUnavailable without one."""
    status = read_status(run)
    if status is None:
        raise RunUnavailable(f"{run} holds no readable status.json: has the run been removed?")
    return status


def goes_on(run: Path) -> bool:
    """Return whether a run is live or starting: its directory is locked before it has a status."""
    status = read_status(run)
    if status is not None and status.live:
        return True
    claimant = _claimant(run)
    return claimant is not None and (status is None or claimant != status.pid)


def _claimant(run: Path) -> int | None:
    """Return the live process that last locked the directory."""
    pid = locker(run)
    return pid if pid is not None and is_alive(pid) else None

"""Status file of a run: the controller's current state for outside observers.

One small JSON object, replaced atomically, without history. Whoever reads it checks every field,
because the file may be a stranger's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.machine import NAME, this_host
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.processes import is_alive
from composer_mesh.mesh.untrusted_json import MIB

STATUS_FILE = "status.json"
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
    is its name. `admin_tls` holds the paths of the fields of `mesh.admin.TlsFiles`, if the admin
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


def newest_live_run(runs: Path) -> Path | None:
    """Return the run directory under `runs` with the newest live status, including ablations."""
    found = [*runs.glob(f"*/{STATUS_FILE}"), *runs.glob(f"*/*/*/{STATUS_FILE}")]
    files = sorted(found, key=_modified, reverse=True)
    for file in files:
        status = read_status(file)
        if status is not None and status.live:
            return file.parent
    return None


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _file(path: Path) -> Path:
    return path if path.suffix == ".json" else path / STATUS_FILE

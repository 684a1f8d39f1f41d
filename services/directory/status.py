"""The status file of a run: what the controller says about itself to whoever looks from outside.

One small JSON object, replaced as a whole. It is no log and no record: it tells the present only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_mesh.mesh.machine import NAME, this_host
from composer_mesh.mesh.processes import is_alive

STATUS_FILE = "status.json"
ENDED = frozenset({"finished", "stopped", "failed"})


@dataclass(frozen=True)
class ActorStatus:
    """One actor as the controller knows it.

    `pid` is None where its process is still to come, `outstanding` the calls that the controller
    has under way there, None where it does not count them. `host` is None, or `localhost`, for the
    controller's own machine; what a process uses of another one is told by that host.
    """

    name: str
    kind: str
    pid: int | None
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
    """A run as it is now; `state` is one of the controller's words, or one of `ENDED`.

    `host` is what the controller's machine and container are known by (`mesh.machine.this_host`),
    `hostname` its name. `admin_tls` are the paths of the fields of `mesh.admin.TlsFiles`, where the
    admin server asks for a certificate. `hosts` are the names that the run has for hosts, by
    Monarch's address.
    """

    pid: int
    admin_url: str | None
    state: str
    step: int
    steps: int
    policy_version: int
    transport: str
    actors: tuple[ActorStatus, ...] = ()
    restarts: int = 0
    telemetry_url: str | None = None
    host: str = ""
    hostname: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    admin_tls: Mapping[str, str] = field(default_factory=dict)

    @property
    def here(self) -> bool:
        """Whether its controller is on this machine, in this container."""
        return not self.host or self.host == this_host()

    @property
    def live(self) -> bool:
        """Whether the run goes on: not ended by its own word, and its process is there.

        Of a process elsewhere its word is all that is known here.
        """
        return self.state not in ENDED and (not self.here or is_alive(self.pid))


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the status file, atomically; `path` is the run directory or the file in it."""
    path = _file(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(dataclasses.asdict(status), indent=1) + "\n")
    draft.replace(path)


def read_status(path: Path) -> RunStatus | None:
    """The status in a run directory, or None where there is none that can be read."""
    try:
        data: dict[str, Any] = json.loads(_file(path).read_text())
        actors = tuple(ActorStatus(**actor) for actor in data.pop("actors"))
        return RunStatus(**data, actors=actors)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_live_run(runs: Path) -> Path | None:
    """The run directory under `runs` whose live status is the newest, an ablation's included."""
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

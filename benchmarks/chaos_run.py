"""Observes a run from outside: the real command, its growing files, its processes.

Calls none of the run's own code, so that observations do not depend on what failed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_mesh.mesh.processes import is_alive

PRESET = Path(__file__).resolve().parents[1] / "configs" / "quickstart.toml"
HOOK = Path(__file__).resolve().parent / "chaos_hook"
MARKER_ENV, FOLDER_ENV = "COMPOSER_MESH_CHAOS", "COMPOSER_MESH_CHAOS_FOLDER"
ALIVE = frozenset({"ready", "busy"})


@dataclass(frozen=True)
class Actor:
    """A serving actor, as named by the run's status file."""

    name: str
    kind: str
    pid: int
    host: str = ""

    @property
    def slot(self) -> str:
        return slot_of(self.name)


def slot_of(name: str) -> str:
    """Return the slot of an actor: `generator-0` for all processes in that slot.

    >>> slot_of("generator-0.2")
    'generator-0'
    """
    return name.partition(".")[0]


def host_of(event: Mapping[str, Any]) -> str | None:
    """Return the host that an event is about, if any."""
    found: str | None = event.get("fields", {}).get("host")
    return found


class Tail:
    """Reads a growing file of JSON lines, and remembers its bytes to detect rewrites."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""
        self._seen = hashlib.sha256()

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of the new complete lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                fresh = file.read()
        except FileNotFoundError:
            return []
        self._at += len(fresh)
        self._seen.update(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def intact(self) -> bool:
        """Whether the file still starts with every byte that was ever read from it."""
        if not self._at:
            return True
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            return hashlib.sha256(file.read(self._at)).digest() == self._seen.digest()
        return False


class StoredTraces:
    """Reads the trace ids in a run's database, and remembers them to detect losses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[str] = set()

    def read(self) -> list[str]:
        """Return the new ids."""
        fresh = [one for one in self._ids() if one not in self._seen]
        self._seen.update(fresh)
        return fresh

    @property
    def intact(self) -> bool:
        """Whether every rollout that was ever stored still is."""
        return self._seen.issubset(self._ids())

    def _ids(self) -> list[str]:
        place = f"{self._path.absolute().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(place, uri=True)) as rows:
                return [one for (one,) in rows.execute("SELECT trace_id FROM traces")]
        except sqlite3.OperationalError:  # the database does not exist yet
            return []


@dataclass
class LiveRun:
    """A `train` command, and the contents of its directory so far."""

    root: Path
    marker: str
    process: subprocess.Popen[bytes]
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    first_seen: dict[str, int] = field(default_factory=dict)
    """By trace: the number of steps done when it was first read."""
    progress: list[float] = field(default_factory=list)
    """The times at which a step or an evaluation was first read."""

    def __post_init__(self) -> None:
        self._tails = {
            name: Tail(self.root / name)
            for name in ("events.jsonl", "metrics.jsonl", "evaluations.jsonl")
        }
        self._traces = StoredTraces(self.root / "run.sqlite")
        self.began = time.monotonic()

    @property
    def policies(self) -> Path:
        """Where the weights of each checkpoint are kept after the run deletes it."""
        return self.root.with_suffix(".policies")

    def poll(self) -> None:
        """Read what is new. Traces before metrics, so that no trace is dated too late."""
        traces = self._traces.read()
        self.events += self._tails["events.jsonl"].read()
        for name, kept in (("metrics", self.metrics), ("evaluations", self.evaluations)):
            fresh = self._tails[f"{name}.jsonl"].read()
            kept += fresh
            self.progress += [time.monotonic()] * len(fresh)
        for trace_id in traces:
            self.first_seen.setdefault(trace_id, len(self.metrics))
        self._keep_policies()

    @property
    def rewritten(self) -> list[str]:
        """Files that lost content."""
        changed = [name for name, tail in self._tails.items() if not tail.intact]
        return changed if self._traces.intact else [*changed, "run.sqlite"]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def since_progress_s(self) -> float:
        return time.monotonic() - (self.progress[-1] if self.progress else self.began)

    def longest_wait_s(self) -> float:
        """Longest time between two steps or evaluations, from the first one on."""
        pairs = zip(self.progress, self.progress[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)

    def actors(self) -> list[Actor]:
        """Return the serving actors of the run's status, in the order of their slots."""
        try:
            status = json.loads((self.root / "status.json").read_text())
        except (OSError, ValueError):
            return []
        found = [
            Actor(one["name"], one["kind"], one["pid"], one.get("host", ""))
            for one in status["actors"]
            if one.get("state") in ALIVE and one.get("pid") and is_alive(one["pid"])
        ]
        return sorted(found, key=lambda one: one.slot)

    def processes(self) -> list[int]:
        """Return every process that the command started, directly or indirectly, and its own."""
        return marked(self.marker)

    def kill(self) -> None:
        """Kill every process of the run."""
        kill_marked(self.marker)
        self.process.wait()

    @property
    def stderr(self) -> str:
        return self.root.with_suffix(".err").read_text()

    def _keep_policies(self) -> None:
        """Link the weights of new checkpoints, to compute log-probs with them later."""
        for folder in (self.root / "checkpoints").glob("step-*"):
            weights = folder / "model.safetensors"
            with contextlib.suppress(OSError):
                kept = self.policies / f"{folder.name}.{weights.stat().st_ino}"
                if not kept.exists():
                    _link(folder, kept)


def _link(folder: Path, kept: Path) -> None:
    draft = kept.with_name(f".{kept.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix in {".json", ".jinja", ".safetensors", ".txt"}:
            os.link(file, draft / file.name)
    draft.rename(kept)


def marked(marker: str) -> list[int]:
    """Return the living processes that inherited a marker in their environment."""
    wanted = f"{MARKER_ENV}={marker}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if is_alive(pid)]


def kill_marked(marker: str) -> None:
    """SIGKILL the processes that inherited a marker."""
    for pid in marked(marker):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def environment(marker: str, hook_folder: Path | None) -> dict[str, str]:
    """Return the environment of every process of a run.

    With a folder for the hook they listen there for faults.
    """
    found = os.environ | {MARKER_ENV: marker, "OMP_NUM_THREADS": "1"}
    if hook_folder is None:
        return found
    path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH")]))
    return found | {"PYTHONPATH": path, FOLDER_ENV: str(hook_folder)}


@contextlib.contextmanager
def launched(
    root: Path,
    settings: Mapping[str, Any],
    hook_folder: Path | None = None,
    marker: str = "",
    within: Sequence[str] = (),
) -> Iterator[LiveRun]:
    """Start `train` on the quickstart preset; whatever is left of it at the end is killed.

    `marker` is passed where other processes belong to the run; `within` is put before the command.
    """
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "composer_mesh", "train", str(PRESET), *overrides]
    marker = marker or uuid.uuid4().hex
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".out").open("wb") as out, root.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [*within, *command, "--output", str(root)],
            stdout=out,
            stderr=err,
            env=environment(marker, hook_folder),
            start_new_session=True,
        )
    run = LiveRun(root, marker, process)
    try:
        yield run
    finally:
        run.kill()

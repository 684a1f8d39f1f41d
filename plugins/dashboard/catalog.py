"""The runs below a folder, and what a table says of each: state, progress, reward, cost, config.

Reads files only, each again when it has changed, and of a long `metrics.jsonl` a sample of lines:
what is kept of a run does not grow with its length.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from composer_mesh.configs.changes import flat
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import read_table
from composer_mesh.configs.regular_files import open_regular
from composer_mesh.mesh.untrusted_json import MIB, parsed_json
from composer_mesh.services.directory.claim import RunDirectoryError
from composer_mesh.services.directory.report import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    Evaluation,
    read_evaluations,
    unreadable_copy,
)
from composer_mesh.services.directory.resume import CONFIG_FILE
from composer_mesh.services.directory.status import ENDED, EVENTS_FILE, STATUS_FILE, read_status

DEEPEST = 3
"""Levels below the folder: an ablation has its runs in ARM/SEED."""
MOST_RUNS = 2000
SPARKS = 32
BUDGET_S = 0.4
"""Seconds that one look spends on files it has not read; the rest of the runs is read next time."""
READING = "reading"
SILENT_S = 60.0
"""Seconds without a new status after which a run of another machine counts as silent."""
FRESH_S = 1.0
"""Seconds for which a look at the folder is good."""
NOT_COMPARED = ("run.name", "run.import_paths", "policy.cache_dir", "tracking")
LAST = ("run", "eval", "placement", "cluster", "supervision")
"""Sections whose differences are named after those of the others."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MARKS = (CONFIG_FILE, METRICS_FILE, STATUS_FILE, EVENTS_FILE)
READ = (CONFIG_FILE, METRICS_FILE, STATUS_FILE, EVALUATIONS_FILE, SUMMARY_FILE, EVENTS_FILE)
LONGEST_LINE = MIB
LAST_PART = 64 * 1024
"""Bytes at the end of a file in which its last line is looked for."""
T = TypeVar("T")


@dataclass(frozen=True)
class RunSummary:
    """What the table of runs shows. `slug` names the run in addresses.

    `usd` is what teachers and judges have cost; `updated` is the time of its last change.
    """

    slug: str
    name: str
    root: Path
    state: str
    step: int = 0
    steps: int = 0
    rewards: Sequence[float] = ()
    evaluations: Sequence[Evaluation] = ()
    tokens_per_s: float | None = None
    usd: float = 0.0
    updated: float = 0.0
    config: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def live(self) -> bool:
        return self.state in ("running", "starting")

    @property
    def reward(self) -> float | None:
        return self.rewards[-1] if self.rewards else None


class Catalog:
    """The runs of one folder, which may be a run itself; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[tuple[object, ...], RunSummary]] = {}
        self._read: dict[Path, tuple[object, Any, str]] = {}
        self._runs: dict[str, RunSummary] = {}
        self._looked = 0.0
        self.complete = False
        """Whether every run was read in the last look."""

    def read_all(self) -> None:
        """Read every run, in several looks, so that others can ask in between."""
        while not self.complete:
            self.runs()

    def runs(self) -> list[RunSummary]:
        """Return the runs, the latest change first."""
        with self._lock:
            if not self.complete or time.monotonic() - self._looked > FRESH_S:
                self._look()
                self._looked = time.monotonic()
            return sorted(self._runs.values(), key=lambda one: -one.updated)

    def run(self, slug: str) -> RunSummary | None:
        """Return one run as it is now; None if there is none of this name."""
        found = self._runs.get(slug)
        if found is None:
            self.runs()
            found = self._runs.get(slug)
        if found is None:
            return None
        with self._lock:
            return self._summary(found.slug, found.root)

    def _look(self) -> None:
        found: dict[str, RunSummary] = {}
        until = time.monotonic() + BUDGET_S
        for root in _run_folders(self.folder):
            slug = _slug(self.folder, root, found)
            if root in self._known or time.monotonic() < until:
                found[slug] = self._summary(slug, root)
            else:
                found[slug] = RunSummary(slug, slug, root, READING)
        self._runs = found
        self.complete = all(one.state != READING for one in found.values())
        roots = {one.root for one in found.values()}
        self._known = {root: one for root, one in self._known.items() if root in roots}
        self._read = {path: one for path, one in self._read.items() if path.parent in roots}

    def _summary(self, slug: str, root: Path) -> RunSummary:
        read = (slug, *(stamp(root / name) for name in READ))
        known = self._known.get(root)
        if known is not None and known[0] == read:
            found = known[1]
            return replace(found, state=state_of(root)) if found.live else found
        summary = self._summary_of(slug, root)
        self._known[root] = (read, summary)
        return summary

    def _summary_of(self, slug: str, root: Path) -> RunSummary:
        name = str(root.relative_to(self.folder)) if root != self.folder else root.name
        problems: list[str] = []
        config = self._file(root / CONFIG_FILE, _flat_config, problems) or {}
        evaluations = self._file(root / EVALUATIONS_FILE, read_evaluations, problems) or []
        metrics = self._file(root / METRICS_FILE, _sparks, problems) or []
        last = metrics[-1] if metrics else {}
        steps = config.get("run.steps", "0")
        return RunSummary(
            slug,
            name,
            root,
            state_of(root),
            int(_number(last.get("step"))),
            int(steps) if steps.isdecimal() else 0,
            [_number(one.get("reward/mean")) for one in metrics],
            evaluations,
            tokens_per_s(last),
            usd_of(last),
            max((_mtime(root / name) for name in READ), default=0.0),
            config,
            "; ".join(problems),
        )

    def _file(self, path: Path, read: Callable[[Path], T], problems: list[str]) -> T | None:
        """Return what a file says, read again when it has changed; None if it cannot be read."""
        now = stamp(path)
        known = self._read.get(path)
        if known is None or known[0] != now:
            try:
                known = (now, read(path), "")
            except (ConfigError, RunDirectoryError) as error:
                known = (now, None, str(error))
            self._read[path] = known
        problems += filter(None, known[2:])
        found: T | None = known[1]
        return found


def differing(runs: Sequence[RunSummary]) -> dict[str, dict[str, str]]:
    """Return the config keys in which runs differ, and by slug the values; without names."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    found = {}
    for key in keys:
        if key in NOT_COMPARED:
            continue
        values = {run.slug: run.config.get(key, "") for run in runs}
        if len(set(values.values())) > 1:
            found[key] = values
    return {key: found[key] for key in sorted(found, key=lambda one: one.split(".")[0] in LAST)}


def _flat_config(path: Path) -> dict[str, str]:
    return dict(flat(read_table(path)))


def _sparks(path: Path) -> list[dict[str, Any]]:
    return sampled_metrics(path, SPARKS)


def sampled_metrics(path: Path, most: int) -> list[dict[str, Any]]:
    """Return about `most` steps, evenly over the bytes of the file, and the last complete one.

    Raises RunDirectoryError for a file that cannot be read, or a line that is no JSON object.
    """
    try:
        with open_regular(path) as file:
            return _sampled(file, most)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise unreadable_copy(path, error) from None


def _sampled(file: BinaryIO, most: int) -> list[dict[str, Any]]:
    size = file.seek(0, os.SEEK_END)
    found: dict[int, dict[str, Any]] = {}
    for place in range(most):
        at = size * place // most
        if (line := _line_after(file, at)) is not None:
            found.setdefault(*line)
    last = max(0, size - LAST_PART)
    while (line := _line_after(file, last)) is not None:
        found.setdefault(*line)
        last = line[0] + 1
    return [found[at] for at in sorted(found)]


def _line_after(file: BinaryIO, at: int) -> tuple[int, dict[str, Any]] | None:
    """Return the first whole line that begins at a place or behind it, with its place."""
    file.seek(max(0, at - 1))
    if at and not file.readline(LONGEST_LINE).endswith(b"\n"):
        return None
    begun = file.tell()
    line = file.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        return None
    value = parsed_json(line)
    if not isinstance(value, dict):
        raise ValueError("a line is not a JSON object")
    return begun, value


def state_of(root: Path) -> str:
    """Return the state of a run: running, starting, finished, stopped, failed, died or silent."""
    status = read_status(root)
    if status is None:
        if (root / SUMMARY_FILE).exists():
            return "finished"
        begun = (root / METRICS_FILE).exists()
        fresh = time.time() - _mtime(root / EVENTS_FILE) < SILENT_S
        return "starting" if fresh and not begun else "unknown"
    if status.state in ENDED:
        return status.state
    if status.live:
        late = not status.here and time.time() - _mtime(root / STATUS_FILE) > SILENT_S
        return "silent" if late else "running"
    return "died"


def tokens_per_s(step: Mapping[str, Any]) -> float | None:
    """Return the tokens that a step trained by its seconds."""
    seconds = _number(step.get("time/step_s"))
    return _number(step.get("tokens/trained")) / seconds if seconds > 0 else None


def usd_of(step: Mapping[str, Any]) -> float:
    """Return what teachers and judges have cost up to a step."""
    return _number(step.get("replay/usd_total")) + _number(step.get("judge/usd_total"))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders that hold a run, at most MOST_RUNS; runs are not searched for others."""
    level, found = [folder], 0
    for _ in range(DEEPEST + 1):
        deeper: list[Path] = []
        for one in level:
            if any((one / name).is_file() for name in MARKS):
                yield one
                found += 1
                if found == MOST_RUNS:
                    return
            else:
                deeper += _folders(one)
        level = deeper


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def _slug(folder: Path, root: Path, taken: Mapping[str, object]) -> str:
    relative = str(root.relative_to(folder)) if root != folder else root.name
    slug = _UNSAFE.sub("~", relative) or "run"
    number = 2
    while (name := slug if number == 2 else f"{slug}~{number}") in taken:
        number += 1
    return name


def stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written: its time and its size; zeros without a file."""
    try:
        about = path.stat()
    except OSError:
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _mtime(path: Path) -> float:
    return stamp(path)[0] / 1e9

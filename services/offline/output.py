"""Output files of an offline replay: the pairs, and the state that lets the same command resume.

    pairs.jsonl             one pair per line, replaced atomically, so it is never incomplete
    pairs.jsonl.replay/     job.json: the job's identity; report.json; the ledger; the answers

Files of another job, and files that were edited, are never replaced.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.services.directory.claim import RunDirectoryError, claimed
from composer_mesh.services.offline.options import ReplayRefused

FOLDER_SUFFIX = ".replay"
JOB_FILE, REPORT_FILE = "job.json", "report.json"
QUERY_FIELDS = {"name", "kind", "base_url", "model", "error_rate", "max_tokens", "temperature"}
RULES = {"ask", "agreement_threshold", "gate"}
Job = dict[str, Any]


@dataclass
class ReplayOutput:
    """Files of one job; created by `open`."""

    out: Path
    job: Job
    _written: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder of the ledger and the cached answers."""
        return folder_of(self.out)

    @classmethod
    @contextmanager
    def open(cls, out: Path, job: Job) -> Iterator["ReplayOutput"]:
        """Lock the output for a block; raise `ReplayRefused` if it belongs to another job.

        `job` holds everything that the pairs depend on, as plain JSON values.
        """
        job = json.loads(json.dumps(job))
        check_place(out, job)
        with _claimed(folder_of(out)):
            output = cls(out, job, check_place(out, job))
            output._remember()
            yield output

    def write_pairs(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the pairs."""
        content = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
        # The hash is written first, so that after any interruption the file's hash is known.
        self._written = [*self._written[-1:], _digest(content)]
        self._remember()
        _replace(self.out, content)

    def write_report(self, report: Mapping[str, Any], other: Path | None = None) -> None:
        """Write the report next to the pairs, and also to `other`."""
        write_json(self.folder / REPORT_FILE, report)
        if other is not None:
            write_json(other, report)

    def _remember(self) -> None:
        write_json(self.folder / JOB_FILE, {"job": self.job, "written": self._written})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by one JSON object."""
    _replace(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def job_of(config: Config, traces: str) -> Job:
    """Return everything that determines the pairs. `traces` is the mark of the trace index.

    More traces or states, a higher spending limit, or other timeouts resume the same job.
    """
    replay = config.replay
    return {
        "traces": traces,
        "teachers": [
            teacher.model_dump(mode="json", include=QUERY_FIELDS) for teacher in replay.teachers
        ],
        "seed": config.run.seed,
        "rules": replay.model_dump(mode="json", include=RULES),
        "filters": [filter.model_dump(mode="json") for filter in replay.filters],
    }


def folder_of(out: Path) -> Path:
    """Return the folder of the job's state next to a file of pairs."""
    return out.with_name(out.name + FOLDER_SUFFIX)


def check_place(out: Path, job: Job) -> list[str]:
    """Return the hashes that this job may have written; raise `ReplayRefused` for other content.

    Changes nothing.
    """
    before = _before(folder_of(out) / JOB_FILE)
    if before is not None and (changed := _differences(before["job"], job)):
        raise ReplayRefused(
            f"--out {out} belongs to a replay with other {changed}: ask for the same, or name "
            "another file"
        )
    written: list[str] = before["written"] if before is not None else []
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ReplayRefused(f"--out {out} must be a file in a folder that is there: correct it")
    if out.exists() and _digest(out.read_bytes()) not in written:
        raise ReplayRefused(
            f"--out {out} holds something else than the last replay into it wrote, which would be "
            "lost: move it away, or name another file"
        )
    return written


def _before(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        before = json.loads(text)
        _ = dict(before["job"]), list(before["written"])
    except (ValueError, KeyError, TypeError):
        raise ReplayRefused(
            f"{path} is not what a replay wrote there: move {path.parent} away, or name another "
            "file with --out"
        ) from None
    return dict(before)


def _differences(before: Job, now: Job) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key])


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    try:
        with claimed(folder):
            yield
    except RunDirectoryError as error:
        raise ReplayRefused(
            f"{folder} cannot be had ({error}): wait for the other replay, or name another file "
            "with --out"
        ) from None


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically; it is on disk before it replaces an earlier one."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise ReplayRefused(
            f"{path} cannot be written ({error.strerror}): free the disk or name another place"
        ) from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

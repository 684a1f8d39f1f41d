"""The worker's end of a box's stream: the job that goes in, the report that comes out.

A report is data of a stranger: the command may have ended the runner, or become it. Each length is
bounded before it is read, each path is checked, and nothing is written on this machine.
"""

from __future__ import annotations

import asyncio
import marshal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from composer_mesh.mesh.sandboxes import records
from composer_mesh.tasks.sandbox import FileTree, SandboxLimits, check_path

MOST_RECORDS = 20_000
LONGEST_NUMBER = 64
MOST_REFUSED = 100


class BadReport(Exception):
    """What came from a box is no report."""


@dataclass
class Reported:
    """What a box said of its command; `complete` if it came to its end."""

    started: bool = False
    complete: bool = False
    ended: str = "signal"
    exit_code: int | None = None
    seconds: float = 0.0
    cut: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    changed: dict[str, bytes | None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def job_bytes(
    tree: FileTree,
    argv: Sequence[str],
    stdin: bytes,
    limits: SandboxLimits,
    environment: Mapping[str, str],
) -> bytes:
    """Return all that the runner has to know; raise ValueError for what no program can be given."""
    if not argv or any("\0" in word for word in (*argv, *environment, *environment.values())):
        raise ValueError("a command has at least one word, and none with a NUL")
    for path in tree.files():
        check_path(path)
    words = [_encoded(word) for word in argv]
    variables = {_encoded(name): _encoded(value) for name, value in environment.items()}
    files = {path.encode(): tree.read(path) for path in tree.files()}
    job = (words, variables, files, numbers_of(limits), stdin)
    return records.record(records.JOB, data=marshal.dumps(job))


def numbers_of(limits: SandboxLimits) -> dict[str, int]:
    """Return limits as the runner takes them."""
    return {
        "wall_ms": max(1, int(limits.wall_s * 1000)),
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "open_files": limits.open_files,
        "file_bytes": limits.file_bytes,
        "disk_bytes": limits.disk_bytes,
        "output_bytes": limits.output_bytes,
    }


async def read_reported(
    reader: asyncio.StreamReader, tree: FileTree, limits: SandboxLimits
) -> Reported:
    """Return what a box reports, up to its end or to what is no report. Waits for the box."""
    reading = _Reading(set(tree.files()), limits)
    try:
        for _ in range(MOST_RECORDS):
            kind, name, size = records.lengths_of(await reader.readexactly(records.HEAD_BYTES))
            reading.check(kind, name, size)
            reading.take(kind, await reader.readexactly(name), await reader.readexactly(size))
            if reading.found.complete:
                break
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the box ended: its status says why
    except BadReport:
        return Reported(started=reading.found.started)
    return reading.found


class _Reading:
    """Builds a report from records, each of which is checked."""

    def __init__(self, paths: set[str], limits: SandboxLimits) -> None:
        self._paths, self._limits, self._left = paths, limits, limits.disk_bytes
        self.found = Reported()

    def check(self, kind: bytes, name: int, size: int) -> None:
        """Raise BadReport where a record is longer than one of its kind can be."""
        longest = {
            records.STDOUT: self._limits.output_bytes,
            records.STDERR: self._limits.output_bytes,
            records.FILE: min(self._limits.file_bytes, self._left),
        }.get(kind, LONGEST_NUMBER)
        if name > records.LONGEST_NAME or size > longest:
            raise BadReport

    def take(self, kind: bytes, name: bytes, data: bytes) -> None:
        """Add a record; raise BadReport for one that no runner sends."""
        found = self.found
        if kind == records.STARTED:
            found.started = True
        elif kind in (records.EXITED, records.SIGNALLED, records.LATE, records.SPENT):
            self._end(kind, data)
        elif kind == records.SECONDS:
            found.seconds = _seconds(data)
        elif kind == records.STDOUT:
            found.stdout = data
        elif kind == records.STDERR:
            found.stderr = data
        elif kind == records.CUT:
            found.cut = True
        elif kind == records.REFUSED:
            self._refuse(name)
        elif kind in (records.FILE, records.REMOVED):
            self._change(kind, name, data)
        elif kind == records.END:
            found.complete = True
        else:
            raise BadReport

    def _end(self, kind: bytes, data: bytes) -> None:
        self.found.ended = ENDS[kind]
        if kind == records.EXITED:
            if not data.isdigit() or int(data) > 255:
                raise BadReport
            self.found.exit_code = int(data)

    def _change(self, kind: bytes, name: bytes, data: bytes) -> None:
        path = _text(name)
        try:
            check_path(path)
        except ValueError:
            return self._refuse(name)
        if path in self.found.changed:
            raise BadReport
        if kind == records.FILE:
            self._left -= len(data)
            self.found.changed[path] = data
        elif path in self._paths:
            self.found.changed[path] = None
        else:
            raise BadReport
        return None

    def _refuse(self, name: bytes) -> None:
        if len(self.found.refused) < MOST_REFUSED:
            self.found.refused.append(_text(name)[:300])


ENDS = {
    records.EXITED: "exited",
    records.SIGNALLED: "signal",
    records.LATE: "wall_time",
    records.SPENT: "cpu_time",
}


def _text(name: bytes) -> str:
    """Return a name; bytes that are no UTF-8 are escaped, so that no such path can be taken."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "\0" + ascii(name)[2:-1]


def _seconds(data: bytes) -> float:
    try:
        seconds = float(data)
    except ValueError:
        raise BadReport from None
    if not 0 <= seconds < 1e6:
        raise BadReport
    return seconds


def _encoded(word: str) -> bytes:
    try:
        return word.encode()
    except UnicodeEncodeError:
        raise ValueError("a command has no unpaired surrogates") from None

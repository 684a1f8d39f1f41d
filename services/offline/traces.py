"""Trace files of an offline replay: found, validated line by line, then read group by group.

A run stores its traces in its store (`stored`); .jsonl files come from older runs and from
`composer-mesh traces RUN export`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.rollouts.traces import Trace, trace_from_json
from composer_mesh.services.offline.index import TraceFileError, TraceIndex
from composer_mesh.services.offline.stored import index_store, store_of

CONFIG_FILE = "config.toml"


@dataclass(frozen=True, slots=True)
class Line:
    """Location of one trace."""

    path: Path
    line: int
    offset: int
    length: int

    def read(self) -> list[Trace]:
        """Read the trace; raise TraceFileError if the file has changed."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            line = file.read(self.length)
        try:
            return [trace_from_json(line)]
        except ValidationError:
            raise TraceFileError(
                f"{self.path} line {self.line} is no longer the trace that it was: let no one "
                "rewrite the file during a replay"
            ) from None


def index_traces(source: Path) -> TraceIndex:
    """Index everything at `source` once: a run directory, its traces folder, or one file.

    Held-out traces are skipped, as in a run. Raises `TraceFileError` for invalid traces, before any
    teacher is queried.
    """
    if (run := store_of(source)) is not None:
        return index_store(run)
    files = _files(source)
    index, seen = TraceIndex(_run_of(files[0])), dict[str, Line]()
    for path in files:
        _index_file(path, index, seen)
    if not index.traces:
        raise TraceFileError(f"{source} holds no training trace: name another run or file")
    return index


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    folder = source / "traces" if (source / "traces").is_dir() else source
    if not source.is_dir():
        raise TraceFileError(
            f"{source} does not exist: name a run directory, its traces folder or a .jsonl file"
        )
    files = sorted(folder.glob("*.jsonl")) if _is_trace_folder(folder) else []
    if not files:
        raise TraceFileError(
            f"{source} holds no traces: name a run directory that has begun, its traces folder or "
            "a .jsonl file of traces"
        )
    return files


def _is_trace_folder(folder: Path) -> bool:
    """Return whether the folder's .jsonl files are traces; next to a config they are metrics."""
    return not (folder / CONFIG_FILE).exists()


def _run_of(file: Path) -> Path | None:
    """Return the run directory of a trace file."""
    run = file.absolute().parent.parent
    return run if (run / CONFIG_FILE).is_file() else None


def _index_file(path: Path, index: TraceIndex, seen: dict[str, Line]) -> None:
    offset = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                place = Line(path, number, offset, len(line))
                offset += len(line)
                if line.strip():
                    _add(index, seen, place, line)
    except OSError as error:
        raise TraceFileError(
            f"{path} cannot be read ({error.strerror}): correct its permissions"
        ) from None


def _add(index: TraceIndex, seen: dict[str, Line], place: Line, line: bytes) -> None:
    try:
        trace = trace_from_json(line)
    except ValidationError as error:
        if not line.endswith(b"\n"):  # its writer was interrupted or is still writing
            index.cut += 1
            return
        raise TraceFileError(
            f"{place.path} line {place.line} is no trace ({short_reason(error)}): repair or "
            "remove it"
        ) from None
    if trace.split != "train" or not trace.turns:
        return
    if (other := seen.get(trace.trace_id)) is not None:
        raise TraceFileError(
            f"trace {trace.trace_id[:80]!r} is in {other.path} line {other.line} and in "
            f"{place.path} line {place.line} but ids must be unique: remove one of them"
        )
    seen[trace.trace_id] = place
    index.mark = index.mark or hashlib.sha256(line.strip()).hexdigest()
    index.task, index.traces = trace.task, index.traces + 1
    index.places.setdefault(trace.group_id, []).append(place)

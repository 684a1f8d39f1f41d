"""Trace files of an offline replay: found, validated line by line, then read group by group.

A run stores its traces in its store; .jsonl files come from `composer-mesh traces RUN export`. Only
the locations of groups are in memory, because the traces may exceed it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.mesh.untrusted_json import short_reason
from composer_mesh.rollouts.traces import Trace, trace_from_json, trace_to_json
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.store.group_files import FOLDER
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, GroupRow


class TraceFileError(ReplayRefused):
    """Traces that cannot be replayed; names the file and line, the reason and the repair."""


Place = Callable[[], list[Trace]]
"""Reads some traces of a group from where they are."""


@dataclass
class TraceIndex:
    """Groups of traces by `group_id`, and the run that wrote them, if known.

    `mark` is stable while traces are only appended. `cut` counts incomplete last lines that were
    skipped.
    """

    run: Path | None
    mark: str = ""
    task: str = ""
    traces: int = 0
    cut: int = 0
    places: dict[int, list[Place]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places)

    def groups(self) -> Iterator[list[Trace]]:
        """Yield each group's traces in id order; one group is in memory at a time."""
        for group_id in sorted(self.places):
            yield [trace for read in self.places[group_id] for trace in read()]


CONFIG_FILE = "config.toml"


def index_of(traces: Sequence[Trace], task: str) -> TraceIndex:
    """Return the index of traces in memory that belong to no run directory."""
    index = TraceIndex(None, task=task, traces=len(traces))
    for trace in traces:
        index.places.setdefault(trace.group_id, []).append(partial(list, [trace]))
    return index


@dataclass(frozen=True, slots=True)
class Line:
    """Location of one trace in a file."""

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
            f"{place.path} line {place.line} is not a trace ({short_reason(error)}): repair or "
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
    index.places.setdefault(trace.group_id, []).append(place.read)


def store_of(source: Path) -> Path | None:
    """Return the run directory of a run or of its traces folder; None if it has no store."""
    run = source.absolute().parent if source.name == FOLDER else source
    return run if (run / STORE_FILE).is_file() else None


def index_store(run: Path) -> TraceIndex:
    """Read all finished groups of a run once; raise `TraceFileError` if one is damaged."""
    index = TraceIndex(run.absolute())
    try:
        with RunReader(run) as reader:
            for row in sorted(reader.groups(), key=_age):
                _add_group(run.absolute(), index, reader, row)
    except (DamagedRecord, StoreError) as error:
        raise TraceFileError(str(error)) from None
    if not index.traces:
        raise TraceFileError(f"{run} holds no training trace: name another run or file")
    return index


def _add_group(run: Path, index: TraceIndex, reader: RunReader, row: GroupRow) -> None:
    traces = _training(reader, row.group_id)
    if traces:
        first = hashlib.sha256(trace_to_json(traces[0])).hexdigest()
        index.mark = index.mark or first
        index.task, index.traces = traces[0].task, index.traces + len(traces)
        index.places[row.group_id] = [partial(_stored, run, row.group_id)]


def _age(row: GroupRow) -> tuple[float, int]:
    """Sort key by finishing time, so that a new group never becomes the first one."""
    return (row.finished_at or 0.0, row.group_id)


def _stored(run: Path, group_id: int) -> list[Trace]:
    """Return a stored group's training traces that have turns."""
    with RunReader(run) as reader:
        return _training(reader, group_id)


def _training(reader: RunReader, group_id: int) -> list[Trace]:
    traces = reader.traces(group_id)
    return [trace for trace in traces if trace.split == "train" and trace.turns]

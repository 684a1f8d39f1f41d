"""Traces of a run's store for an offline replay: indexed once, then read group by group.

`traces` does the same for .jsonl files.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.rollouts.traces import Trace, trace_to_json
from composer_mesh.services.directory.report import STORE_FILE
from composer_mesh.services.offline.index import TraceFileError, TraceIndex
from composer_mesh.services.store.group_files import FOLDER
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, GroupRow


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Location of one group's traces."""

    run: Path
    group_id: int

    def read(self) -> list[Trace]:
        """Return the group's training traces that have turns."""
        with RunReader(self.run) as reader:
            return _training(reader, self.group_id)


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
                _add(index, reader, row)
    except (DamagedRecord, StoreError) as error:
        raise TraceFileError(str(error)) from None
    if not index.traces:
        raise TraceFileError(f"{run} holds no training trace: name another run or file")
    return index


def _add(index: TraceIndex, reader: RunReader, row: GroupRow) -> None:
    traces = _training(reader, row.group_id)
    if traces:
        first = hashlib.sha256(trace_to_json(traces[0])).hexdigest()
        index.mark = index.mark or first
        index.task, index.traces = traces[0].task, index.traces + len(traces)
        assert index.run is not None
        index.places[row.group_id] = [StoredGroup(index.run, row.group_id)]


def _age(row: GroupRow) -> tuple[float, int]:
    """Sort key by finishing time, so that a new group never becomes the first one."""
    return (row.finished_at or 0.0, row.group_id)


def _training(reader: RunReader, group_id: int) -> list[Trace]:
    traces = reader.traces(group_id)
    return [trace for trace in traces if trace.split == "train" and trace.turns]

"""Export of rollouts and their pairs for other tools, as JSON lines or Parquet.

    traces.jsonl    one trace per line, as read by `composer-mesh replay`
    traces.parquet  one row per trace, with its step and late reward; lists of ids, not text
    pairs.*         rows in TRL's conversational preference format

One group is in memory at a time. A file gets its final name once it is complete, and existing files
are not overwritten. A group that cannot be read is skipped and reported.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Protocol

from composer_mesh.rollouts.pairs import PreferencePair, pair_record
from composer_mesh.rollouts.traces import trace_to_json
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import DamagedRecord, ItemState
from composer_mesh.services.traces.listing import Both, Listed
from composer_mesh.services.traces.options import Format, TracesRefused

DRAFT = ".draft"
COUNTED = (ItemState.WAITING, ItemState.TRAINED, ItemState.EXPIRED)
"""States of pairs to export; superseded ones, whose rollouts were sampled again, are excluded."""


@dataclass
class Exported:
    """Files written, and groups that could not be read."""

    files: list[Path]
    traces: int = 0
    pairs: int = 0
    damage: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a report for people, line by line."""
        for file, count in zip(self.files, (self.traces, self.pairs), strict=True):
            yield f"{file}: {count:,} rows, {file.stat().st_size:,} bytes"
        for why in self.damage:
            yield f"left out: {why}"


class Sink(Protocol):
    """An output file that is written one group of rollouts, or some pairs, at a time."""

    def traces(self, rollouts: Sequence[Both]) -> None: ...

    def pairs(self, pairs: Sequence[PreferencePair]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def traces(self, rollouts: Sequence[Both]) -> None:
        for _, trace in rollouts:
            self._file.write(trace_to_json(trace) + b"\n")

    def pairs(self, pairs: Sequence[PreferencePair]) -> None:
        for pair in pairs:
            self._file.write(json.dumps(pair_record(pair), ensure_ascii=False).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def export(reader: RunReader, rows: Sequence[Listed], kind: Format, folder: Path) -> Exported:
    """Write these rollouts and their pairs into a folder; may first raise `TracesRefused`."""
    open_sink = sink_of(kind)
    files = [folder / f"traces.{kind}", folder / f"pairs.{kind}"]
    for file in files:
        if file.exists():
            raise TracesRefused(f"{file} is there already: name another folder, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TracesRefused(
            f"--out {folder} cannot be made ({error.strerror}): name another folder"
        ) from None
    done = Exported(files)
    drafts = [file.with_name(f".{file.name}{DRAFT}") for file in files]
    try:
        with ExitStack() as closing:
            traces, pairs = (_opened(open_sink, draft, closing) for draft in drafts)
            _write(reader, rows, traces, pairs, done)
        for draft, file in zip(drafts, files, strict=True):
            draft.rename(file)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return done


def sink_of(kind: Format) -> Callable[[Path], Sink]:
    """Return the writer class of a format; raise `TracesRefused` if its package is missing."""
    if kind == "jsonl":
        return JsonLines
    try:
        from composer_mesh.services.traces.parquet import Parquet
    except ModuleNotFoundError as error:
        raise TracesRefused(
            f"--format parquet needs the package {error.name}, which is not installed: run "
            "pip install 'composer-mesh[export]', or write --format jsonl"
        ) from None
    return Parquet


def _opened(open_sink: Callable[[Path], Sink], path: Path, closing: ExitStack) -> Sink:
    sink = open_sink(path)
    closing.callback(sink.close)
    return sink


def _write(
    reader: RunReader, rows: Sequence[Listed], traces: Sink, pairs: Sink, done: Exported
) -> None:
    ordered = sorted(rows, key=lambda one: (one.row.group_id, one.row.sample))
    written: set[str] = set()
    for group_id, members in groupby(ordered, key=lambda one: one.row.group_id):
        wanted = {one.row.trace_id: one for one in members}
        try:
            group = [trace for trace in reader.traces(group_id) if trace.trace_id in wanted]
        except DamagedRecord as error:
            done.damage.append(str(error))
            continue
        traces.traces([(wanted[trace.trace_id], trace) for trace in group])
        written |= {trace.trace_id for trace in group}
    done.traces = len(written)
    for pair in _pairs(reader, written):
        pairs.pairs([pair])
        done.pairs += 1


def _pairs(reader: RunReader, written: set[str]) -> Iterator[PreferencePair]:
    for row in reader.pairs():
        if row.state in COUNTED:
            pair = stored_pair(row)
            if pair.trace_id in written:
                yield pair

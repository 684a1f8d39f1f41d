"""The `composer-mesh traces` command: list, show and export rollouts, also of a live run.

It only reads the run's directory. For other tools, rollouts and their pairs are exported as

    traces.jsonl    one trace per line, as read by `composer-mesh replay`
    traces.parquet  one row per trace, with its step and late reward; lists of ids, not text
    pairs.*         rows in TRL's conversational preference format

One group is in memory at a time. A file gets its final name once it is complete, and existing files
are not overwritten. A group that cannot be read is skipped and reported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import PreferencePair, pair_record
from composer_mesh.rollouts.traces import Trace, trace_to_json
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.row_values import stored_pair
from composer_mesh.services.store.rows import (
    DamagedRecord,
    ItemState,
    StoreMissing,
    TraceRow,
    Where,
)
from composer_mesh.services.traces.list_page import ListPage
from composer_mesh.services.traces.listing import (
    Both,
    Listed,
    fits,
    listed,
    listing,
    where,
    whole_rollout,
)
from composer_mesh.services.traces.options import (
    Filters,
    Format,
    TracesOptions,
    TracesRefused,
    read_options,
)
from composer_mesh.services.traces.rollout_page import RolloutPage

FAILED = 1
NEAR = 5


def traces_command(arguments: argparse.Namespace) -> int:
    """Run the command; return exit status 1 if something was damaged."""
    options, console = read_options(arguments), Console(highlight=False)
    try:
        with RunReader(options.run) as reader:
            return ACTIONS[options.action](reader, options, console)
    except (StoreMissing, DamagedRecord) as error:
        raise RunUnavailable(str(error)) from None


def chosen(reader: RunReader, filters: Filters) -> list[Listed]:
    """Return the rollouts that match the filters, with their outcomes."""
    rows = (row for row in reader.rows(where(filters)) if fits(row, filters))
    return listed(rows, reader.groups(), reader.rewards(None))


def _list(reader: RunReader, options: TracesOptions, console: Console) -> int:
    found = listing(chosen(reader, options.filters), options.sort, options.reverse, options.limit)
    if options.as_json:
        write_json(one.as_dict() for one in found.shown)
        return 0
    traces, damage = _read(reader, found.shown)
    more = f"--limit 0 shows the other {found.hidden:,} too" if found.hidden else ""
    page = ListPage(found, traces, damage, options.sort == "group", more)
    console.print(page.draw(console.width))
    return FAILED if damage else 0


def _read(reader: RunReader, shown: Sequence[Listed]) -> tuple[dict[str, Trace], dict[int, str]]:
    """Return the shown rollouts by id, and the reasons for groups that cannot be read."""
    traces, damage = dict[str, Trace](), dict[int, str]()
    wanted = {one.row.trace_id for one in shown}
    for group_id in dict.fromkeys(one.row.group_id for one in shown):
        try:
            group = reader.traces(group_id)
        except DamagedRecord as error:
            damage[group_id] = f"is damaged: {error.why}"
        else:
            traces |= {one.trace_id: one for one in group if one.trace_id in wanted}
    return traces, damage


def _show(reader: RunReader, options: TracesOptions, console: Console) -> int:
    assert options.trace is not None
    row = find(reader, options.trace)
    (one,) = listed([row], reader.groups(), reader.rewards(None))
    rollout = whole_rollout(reader, options.run, one, config_of(options.run))
    if options.as_json:
        write_json([rollout.as_dict()])
    else:
        console.print(RolloutPage(rollout, options.full).draw())
    return 0


def find(reader: RunReader, name: str) -> TraceRow:
    """Return the rollout of a trace_id or of GROUP/SAMPLE; raise `RunUnavailable` if not found."""
    for row in reader.rows(Where(trace_id=name)):
        return row
    group, _, sample = name.partition("/")
    near = list(reader.rows(Where(group_id=int(group)))) if group.isdecimal() else []
    for row in near:
        if str(row.sample) == sample:
            return row
    raise RunUnavailable(_no_such(name, near or list(reader.rows(limit=NEAR))))


def _no_such(name: str, others: Sequence[TraceRow]) -> str:
    near = ", ".join(plain_text(row.trace_id) for row in others[:NEAR])
    instead = f"it has for example {near}" if near else "none is stored there yet"
    return f"the run has no rollout {plain_text(name)}: {instead}"


def config_of(run: Path) -> Config | None:
    """Load the config of a run; None if it cannot be read, which omits what depends on it."""
    try:
        return load_config(run / "config.toml", model_later=True)
    except ConfigError:
        return None


def _export(reader: RunReader, options: TracesOptions, console: Console) -> int:
    assert options.out is not None
    rows = chosen(reader, options.filters)
    done = export(reader, rows, options.format, options.out)
    for line in done.lines():
        console.print(Text(line), soft_wrap=True)
    return FAILED if done.damage else 0


def write_json(values: Iterable[dict[str, Any]]) -> None:
    """Print each value as one JSON object per line."""
    for value in values:
        sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


ACTIONS = {"list": _list, "show": _show, "export": _export}


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
            f"--output {folder} cannot be made ({error.strerror}): name another folder"
        ) from None
    done = Exported(files)
    drafts = [file.with_name(f".{file.name}{DRAFT}") for file in files]
    try:
        traces_draft, pairs_draft = drafts
        with closing(open_sink(traces_draft)) as traces, closing(open_sink(pairs_draft)) as pairs:
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

"""The `composer-mesh traces` command: list, show and export rollouts, also of a live run.

It only reads the run's directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.reading import RunReader
from composer_mesh.services.store.rows import DamagedRecord, StoreMissing, TraceRow, Where
from composer_mesh.services.traces.export import export
from composer_mesh.services.traces.list_page import ListPage
from composer_mesh.services.traces.listing import Listed, fits, listed, listing, where
from composer_mesh.services.traces.options import Filters, TracesOptions, read_options
from composer_mesh.services.traces.rollout_page import RolloutPage
from composer_mesh.services.traces.whole import whole_rollout

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

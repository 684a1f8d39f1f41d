"""Renders the mesh of a run as a terminal page: one line per process, fitted to the width.

Renders only the object of `mesh_view`. A narrow page leaves out columns and never wraps; no text is
interpreted as markup or reaches the terminal as a control code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from composer_mesh.mesh.machine import NAME as LOCALHOST
from composer_mesh.services.inspection.events_command import event_line
from composer_mesh.services.inspection.page import STATE_STYLES, plain_text

WIDE, WIDEST = 120, 160
MIB = 1 << 20
PROLOGUES = ("the process this actor was running on ", "its process ", "failed: ")
"""Prefixes of the reason for an actor's death that are too long for a narrow column."""
Cell = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class TreeColumn:
    """A column of figures; `wide` ones are left out of a narrow page."""

    title: str
    cell: Cell
    wide: bool = False


def _actor(process: Mapping[str, Any], key: str) -> Any:
    return process["actors"][0][key] if process["actors"] else None


def _figure(value: Any, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)


def _memory(process: Mapping[str, Any]) -> str:
    used = process["rss_bytes"]
    return "-" if used is None else f"{used / MIB:,.0f} MiB"


COLUMNS = (
    TreeColumn("policy", lambda one: _figure(_actor(one, "policy_version"), "v{}")),
    TreeColumn("restarts", lambda one: str(one["restarts"])),
    TreeColumn("memory", _memory),
    TreeColumn("cpu", lambda one: _figure(one["cpu_percent"], "{:.0f} %")),
    TreeColumn("queue", lambda one: _figure(one["queue_depth"])),
    TreeColumn("calls", lambda one: _figure(_actor(one, "outstanding")), wide=True),
    TreeColumn("messages", lambda one: _figure(_actor(one, "messages_processed")), wide=True),
    TreeColumn("pid", lambda one: _figure(one["pid"]), wide=True),
)


@dataclass(frozen=True)
class MeshPage:
    """A run and its mesh, rendered for the width of the console."""

    about: Mapping[str, Any]
    recent_events: Sequence[Mapping[str, Any]] = ()
    """Events of the run, newest last."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        hosts, missing = self.about["hosts"], _by_host(self.about["missing"])
        everybody = [one for host in hosts for one in host["processes"]] + self.about["missing"]
        longest = max((len(plain_text(one["name"])) for one in everybody), default=0)
        alone = hosts[0]["name"] if len(hosts) == 1 else LOCALHOST
        missing[alone] = missing.pop(LOCALHOST, []) + missing.pop(alone, [])
        yield self._header()
        for host in hosts:
            yield _line(f"host {host['name']}", "bold")
            processes = host["processes"] + missing.pop(host["name"], [])
            yield _table(processes, width, longest)
            yield _line(f"  and {host['system']['actors']} actors of Monarch itself", "dim")
        if not self.about["mesh"]:
            yield _line(
                "no admin server answers: this is what the run itself reported last", "yellow"
            )
        for name, processes in missing.items():
            if len(missing) > 1 and processes:
                yield _line(f"host {name}", "bold")
            if processes:
                yield _table(processes, width, longest)
        if self.recent_events:
            yield _line("lately", "bold")
        for event in self.recent_events:
            yield _event_line(event, width)

    def _header(self) -> Text:
        about = self.about
        rest = (
            f"  step {about['step']}/{about['steps']}  policy v{about['policy_version']}"
            f"  restarts {about['restarts']}  transport {plain_text(about['transport'])}"
        )
        state = (plain_text(about["state"]), "bold cyan")
        return Text.assemble(
            (plain_text(about["run"]), "bold"), "  ", state, rest, no_wrap=True, overflow="ellipsis"
        )


def _by_host(processes: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group processes by the name of their host."""
    found: dict[str, list[dict[str, Any]]] = {}
    for process in processes:
        found.setdefault(_actor(process, "host") or LOCALHOST, []).append(process)
    return found


def _line(text: str, style: str) -> Text:
    return Text(plain_text(text), style=style, no_wrap=True, overflow="ellipsis")


def _event_line(event: Mapping[str, Any], width: int) -> Text:
    """Format an event on one line; its fields are shown on wide pages only."""
    shown = dict(event) if width >= WIDE else {**event, "fields": None}
    line = Text.assemble("  ", event_line(shown))
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _table(processes: list[dict[str, Any]], width: int, longest: int) -> Table:
    """Build the table of processes; all tables align to `longest`, the longest name's length."""
    wide = width >= WIDE
    columns = [column for column in COLUMNS if wide or not column.wide]
    padding = (0, 2 if wide else 1, 0, 0)
    table = Table(box=None, width=width, padding=padding, pad_edge=False)
    table.add_column(
        "  process", no_wrap=True, overflow="ellipsis", header_style="dim", min_width=longest + 2
    )
    table.add_column("state", no_wrap=True, overflow="ellipsis", ratio=1, header_style="dim")
    for column in columns:
        table.add_column(column.title, no_wrap=True, justify="right", header_style="dim")
    for process in processes:
        name = Text("  " + plain_text(process["name"]))
        table.add_row(name, _doing(process), *(column.cell(process) for column in columns))
    return table


def _doing(process: Mapping[str, Any]) -> Text:
    """Return the state and the actor's activity; for a busy actor the activity alone."""
    state, activity = plain_text(process["state"]), plain_text(_actor(process, "activity") or "")
    style = STATE_STYLES.get(process["state"], "")
    if activity in ("", "idle"):
        return Text(state, style=style)
    if state == "busy":
        return Text(activity, style=style)
    for prologue in PROLOGUES:
        activity = activity.removeprefix(prologue)
    return Text.assemble((state, style), f": {activity}")

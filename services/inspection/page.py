"""Renders a run's terminal page, and the plain log line of a step.

`view` decides when it is drawn. Text may be model output, so none is interpreted as markup or
reaches the terminal as a control code.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.box import ROUNDED, SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_mesh.services.directory.channel_activity import channels_of
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.directory.status import ActorStatus

WIDE = 128
TRAINING = "training"
"""The phase in which a run prints a line for each step."""
EVENTS_SHOWN = 5
WARNINGS_SHOWN = 3
ACTORS_SHOWN = 12
SPARKS = "▁▂▃▄▅▆▇█"
STATE_STYLES = {
    "ready": "green",
    "busy": "cyan",
    "starting": "yellow",
    "draining": "magenta",
    "dead": "bold red",
    "failed": "bold red",
}

# name, key, format; the order is the order of every plain line.
PLAIN_FIELDS = (
    ("version", "policy_version", "d"),
    ("reward_mean", "reward/mean", ".3f"),
    ("loss_total", "loss/total", ".4f"),
    ("loss_policy", "loss/policy", ".4f"),
    ("loss_sdpo", "loss/sdpo", ".4f"),
    ("loss_replay", "loss/replay", ".4f"),
    ("rollouts", "rollouts/count", "d"),
    ("error_sites", "rollouts/error_sites", "d"),
    ("sdpo_tokens", "sdpo/tokens", "d"),
    ("replay_pairs", "replay/pairs", "d"),
    ("replay_usd", "replay/usd", ".4f"),
    ("replay_usd_total", "replay/usd_total", ".4f"),
    ("lag_mean_versions", "lag/mean", ".2f"),
    ("lag_max_versions", "lag/max", "d"),
    ("trained_tokens", "tokens/trained", "d"),
    ("step_s", "time/step_s", ".2f"),
    ("wait_batch_s", "time/wait_batch_s", ".2f"),
    ("train_s", "time/train_s", ".2f"),
    ("weight_sync_s", "time/weight_sync_s", ".3f"),
)


@dataclass
class PageData:
    """Everything that the page shows."""

    name: str
    steps: int
    transport: str
    started: float
    ceiling_usd: float | None = None
    phase: str = "starting"
    last: Mapping[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    actors: Sequence[ActorStatus] = ()
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))
    warnings: dict[str, tuple[float, str]] = field(default_factory=dict)
    """The newest warning of each kind, with its time."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started


def plain_text(text: str, limit: int = 400) -> str:
    """Return one printable line of text: control characters become escapes."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:limit])
    return shown if len(text) <= limit else shown + "…"


def plain_line(step: Mapping[str, Any], steps: int) -> str:
    """Format a step as one line: always the same keys in the same order; a channel can be `off`."""
    fields = [f"{name}={_figure(step, key, form)}" for name, key, form in PLAIN_FIELDS]
    return " ".join([f"step={step.get('step', '-')}/{steps}", *fields])


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a sparkline of at most `width` characters; its range includes 0 to 1."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / (high - low) * top)] for mean in means)


def _figure(step: Mapping[str, Any], key: str, form: str) -> str:
    value = step.get(key)
    if value is None:
        return "off" if key in step and key.startswith("loss/") else "-"
    if not math.isfinite(value):
        return str(value)
    return format(round(value) if form.endswith("d") else float(value), form)


def page_of(shown: PageData, width: int) -> RenderableType:
    inner = width - 4  # the panel's frame and padding
    if width >= WIDE:
        half = inner // 2 - 1
        body = Table.grid(padding=(0, 2, 0, 0))
        body.add_column(width=half)
        body.add_column(width=half)
        body.add_row(_metrics(shown, half), _actors(shown))
        parts: list[RenderableType] = [body]
    else:
        parts = [_metrics(shown, inner), _actors(shown)]
    return Panel(
        Group(_progress(shown), Text(), *parts, *_warnings(shown), *_events(shown)),
        title=Text.assemble("composer-mesh · ", (shown.name, "bold")),
        title_align="left",
        border_style="dim",
        box=ROUNDED,
    )


def _progress(shown: PageData) -> Table:
    done = int(shown.last.get("step", 0))
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True, overflow="ellipsis", max_width=32)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    minutes, seconds = divmod(int(shown.elapsed_s), 60)
    row.add_row(
        Text(shown.phase, style="bold cyan"),
        ProgressBar(total=shown.steps, completed=done),
        Text(f"step {done}/{shown.steps}  {minutes}:{seconds:02d}"),
    )
    return row


def _metrics(shown: PageData, width: int) -> Table:
    """Build the label and value rows of the last step; `width` bounds the curve."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="cyan", no_wrap=True)
    rows.add_column(no_wrap=True, overflow="ellipsis")
    rows.add_row("success", Text(_success(shown.evaluations)))
    rows.add_row("transport", Text(shown.transport or "not chosen yet"))
    if step := shown.last:
        curve = (sparkline(shown.rewards, max(8, width - 20)), "blue")
        rows.add_row("reward", Text.assemble(_figure(step, "reward/mean", ".3f"), " ", curve))
        rows.add_row("losses", _losses(step))
        rows.add_row("lag", Text(f"{_figure(step, 'lag/max', 'd')} versions at most"))
        rows.add_row("rollouts", Text(_work(step)))
        if shown.ceiling_usd is not None:
            rows.add_row("teachers", Text(_cost(step, shown.ceiling_usd)))
        if "judge/usd_total" in step:
            rows.add_row("judges", Text(_judged(step)))
        rows.add_row("step", Text(_times(step)))
    return rows


def _success(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return "not measured yet"
    path = " → ".join(f"{e.success:.1%}" for e in (evaluations[0], *evaluations[1:][-1:]))
    last = evaluations[-1]
    decoding = f", {last.decoding}" if last.decoding else ""
    return f"{path} of {last.episodes} held-out episodes{decoding}"


def _losses(step: Mapping[str, Any]) -> Text:
    parts: list[tuple[str, str]] = []
    for channel in channels_of([step]):
        value = _figure(step, f"loss/{channel}", ".4f")
        parts += [(f"{channel} ", "dim"), (value, "dim" if value in "-off" else "default")]
        parts.append(("  ", "default"))
    return Text.assemble(*parts[:-1])


def _work(step: Mapping[str, Any]) -> str:
    return (
        f"{_figure(step, 'rollouts/count', 'd')},"
        f" {_figure(step, 'rollouts/error_sites', 'd')} error sites,"
        f" {_figure(step, 'replay/pairs', 'd')} pairs trained"
    )


def _cost(step: Mapping[str, Any], ceiling_usd: float) -> str:
    return (
        f"${_figure(step, 'replay/usd_total', '.4f')} of ${ceiling_usd:,.2f},"
        f" {_figure(step, 'replay/states', 'd')} states queried,"
        f" {_figure(step, 'replay/skipped', 'd')} skipped,"
        f" {_figure(step, 'replay/waiting', 'd')} pairs waiting"
    )


def _judged(step: Mapping[str, Any]) -> str:
    return (
        f"${_figure(step, 'judge/usd_total', '.4f')},"
        f" {_figure(step, 'judge/requests', 'd')} requests"
    )


def _times(step: Mapping[str, Any]) -> str:
    seconds, tokens = step.get("time/step_s"), step.get("tokens/trained")
    if not seconds or tokens is None:
        return "-"
    return (
        f"{tokens / seconds:,.0f} tokens/s, {seconds:.2f} s"
        f" (wait {_figure(step, 'time/wait_batch_s', '.2f')},"
        f" train {_figure(step, 'time/train_s', '.2f')})"
    )


def _actors(shown: PageData) -> RenderableType:
    if not shown.actors:
        return Text()
    table = Table(box=SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("actor", no_wrap=True, overflow="ellipsis", max_width=24)
    table.add_column("state", no_wrap=True)
    table.add_column("version", justify="right")
    table.add_column("activity", no_wrap=True, overflow="ellipsis", ratio=1)
    for actor in shown.actors[:ACTORS_SHOWN]:
        version = "-" if actor.policy_version is None else str(actor.policy_version)
        state = Text(plain_text(actor.state), style=STATE_STYLES.get(actor.state, ""))
        name, activity = Text(plain_text(actor.name)), Text(plain_text(actor.activity))
        table.add_row(name, state, Text(version), activity)
    if hidden := len(shown.actors) - ACTORS_SHOWN:
        table.caption = f"and {hidden} more" if hidden > 0 else None
    return table


def _warnings(shown: PageData) -> list[Text]:
    newest = list(shown.warnings.values())[-WARNINGS_SHOWN:]
    return [Text.assemble((f"{at:7.1f} s  ", "dim"), (text, "yellow")) for at, text in newest]


def _events(shown: PageData) -> list[Text]:
    return [
        Text.assemble((f"{at:7.1f} s  ", "dim"), text, no_wrap=True, overflow="ellipsis")
        for at, text in shown.events
    ]

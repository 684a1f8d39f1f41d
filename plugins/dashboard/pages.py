"""Templates of the page, with every value escaped; and how they show numbers, times and text.

Text of models and tools is shown by `lines`: control codes and marks of direction become escapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from composer_mesh.plugins.dashboard.charts import figure, recent, sparkline
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.inspection.events_command import clock
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.traces.text import (
    action_line,
    call_line,
    calls_of,
    content_of,
    plain_lines,
)

MOST_LINES = 40
LONGEST_CELL = 300
LONGEST_SHOWN = 200_000
"""Characters of one text on a page, of all its lines together."""


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the templates with their filters."""
    made = Environment(
        loader=PackageLoader("composer_mesh.plugins.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    return made


def render(name: str, context: Mapping[str, Any]) -> str:
    """Return a template, filled in."""
    return environment().get_template(name).render(context)


def lines(text: Any, full: bool = False) -> str:
    """Return a text as it is shown: its lines without control codes, the middle left out."""
    shown = "\n".join(plain_lines(str(text), None if full else MOST_LINES))
    shown = shown.replace("; --full shows them", "")
    if len(shown) <= LONGEST_SHOWN:
        return shown
    return f"{shown[:LONGEST_SHOWN]}\n… {len(shown) - LONGEST_SHOWN:,} characters left out …"


def message_text(message: Message, full: bool = False) -> str:
    """Return a chat message: its content, then its calls, one on each line."""
    parts = [content_of(message)] if content_of(message) else []
    parts += [call_line(name, given) for name, given in calls_of(message)]
    return lines("\n".join(parts) or "(empty)", full)


def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def number(value: Any, digits: int | None = None) -> str:
    """Format a number; a dash for none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}" if digits is not None else figure(float(value))


def memory(size: float | None) -> str:
    return "–" if size is None else f"{size / (1 << 20):,.0f} MiB"


def ago(seconds: float) -> str:
    """Format how long ago a time was."""
    past = max(0.0, time.time() - seconds)
    for bound, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if past >= bound:
            return f"{past / bound:.0f} {unit} ago"
    return "now" if past < 5 else f"{past:.0f} s ago"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def plain(value: Any, limit: int = LONGEST_CELL) -> str:
    return plain_text(str(value), limit)


def action(text: str, limit: int = 200) -> str:
    return action_line(text, limit)


def linked(text: str) -> Markup:
    """Return a key with a place to break after each dot, for narrow columns."""
    return Markup(".<wbr>").join(escape(part) for part in text.split("."))


FILTERS: dict[str, Callable[..., Any]] = {
    "lines": lines,
    "message_text": message_text,
    "percent": percent,
    "number": number,
    "memory": memory,
    "clock": clock,
    "ago": ago,
    "duration": duration,
    "plain": plain,
    "action": action,
    "broken": linked,
    "spark": sparkline,
    "recent": recent,
}

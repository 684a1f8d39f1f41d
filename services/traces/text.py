"""Safe terminal rendering of text written by models and tools.

Control codes and markup have no effect, and a bar at the left separates the text from the page's
own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from composer_mesh.rollouts.tool_calls import OPEN, ToolCall, parse_action
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.inspection.page import plain_text

LONGEST_LINE = 20_000
TAB = "    "
BAR = "│ "
GUTTER = 8
"""Width of the labels left of the bars."""
HEAD_SHARE = 0.7
"""Share of the lines of a truncated text that are taken from its beginning."""
ONE_LINE_CALL = 100


def plain_lines(text: str, most: int | None = None) -> list[str]:
    """Return the lines of a text without control codes, omitting the middle of a long text."""
    lines = [plain_text(line.replace("\t", TAB), LONGEST_LINE) for line in text.split("\n")]
    if most is None or len(lines) <= most:
        return lines
    head = max(1, int(most * HEAD_SHARE))
    tail = most - head
    left_out = f"… {len(lines) - most:,} lines left out; --full shows them …"
    return [*lines[:head], left_out, *(lines[-tail:] if tail else [])]


def one_line(text: str, limit: int) -> str:
    """Return the words of a text on one line of at most `limit` characters."""
    words = " ".join(text[: limit * 8].split())
    shown = plain_text(words, LONGEST_LINE)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


@dataclass(frozen=True)
class QuotedText:
    """Untrusted text behind a bar, so that its lines cannot imitate the page's own.

    `label` names the speaker. A `remark` of the page's own is printed above the text, next to the
    label.
    """

    label: str
    text: Text
    style: str = "default"
    remark: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label = Segment(f"{self.label:>{GUTTER}} ", console.get_style(f"bold {self.style}"))
        if self.remark:
            yield label
            yield Text(self.remark, style="dim")
            label = Segment(" " * (GUTTER + 1))
        bar = Segment(BAR, console.get_style(f"dim {self.style}"))
        inner = options.update(width=max(1, options.max_width - GUTTER - 1 - len(BAR)))
        for line in console.render_lines(self.text, inner, style=Style(), pad=False):
            yield label
            yield bar
            yield from line
            yield Segment.line()
            label = Segment(" " * (GUTTER + 1))


def content_of(message: Message) -> str:
    """Return the text of a chat message; non-text parts of a list are replaced by their type."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return "" if content is None else str(content)


def calls_of(message: Message) -> list[tuple[str, Any]]:
    """Return the tool calls of a message: names and arguments, parsed where possible."""
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found.append((str(function.get("name")), _parsed(function.get("arguments"))))
    return found


def call_line(name: str, arguments: Any) -> str:
    """Format a call on one line: `lookup(key="desk")`."""
    if not isinstance(arguments, Mapping):
        return f"{name}({arguments})"
    given = ", ".join(f"{key}={_value(value)}" for key, value in arguments.items())
    return f"{name}({given})"


def call_text(name: str, arguments: Any, most: int | None = None) -> Text:
    """Format a call on one line, or with a block for each argument if that would be long."""
    line = call_line(name, arguments)
    if not isinstance(arguments, Mapping) or (len(line) <= ONE_LINE_CALL and "\\n" not in line):
        return Text.assemble((plain_text(name), "bold cyan"), plain_text(line[len(name) :], 10_000))
    text = Text(plain_text(name), style="bold cyan")
    for key, value in arguments.items():
        text.append(f"\n  {plain_text(str(key))}: ", "cyan")
        shown = plain_lines(value if isinstance(value, str) else _value(value), most)
        if len(shown) > 1:
            shown = ["", *shown]
        text.append("\n      ".join(shown), "default")
    return text


def action_line(text: str, limit: int) -> str:
    """Format an action's text on one line: its call, or its words."""
    action = parse_action(text) if OPEN in text else None
    if isinstance(action, ToolCall):
        return one_line(call_line(action.name, action.arguments), limit)
    return one_line(text, limit)


def message_line(message: Message, limit: int) -> str:
    """Format an assistant message on one line: its calls, else its words."""
    calls = [call_line(name, arguments) for name, arguments in calls_of(message)]
    return one_line("; ".join(calls) or content_of(message), limit)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type", "part") if isinstance(part, dict) else "part"
    return f"[{kind}]"


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

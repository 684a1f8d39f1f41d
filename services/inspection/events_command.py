"""`composer-mesh events`: prints a run's events from its file, also while the run is running.

Read-only. Any line may contain model output: it is shown as plain text, never as markup or control
codes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.text import Text

from composer_mesh.configs.regular_files import UnusableFile, open_regular
from composer_mesh.mesh.untrusted_json import MIB, parsed_json
from composer_mesh.services.directory.status import EVENTS_FILE, RunUnavailable, goes_on
from composer_mesh.services.inspection.page import plain_text

POLL_S = 0.2
LONGEST = 2000
LONGEST_LINE = 4 * MIB
MOST_PARTS = 16
"""Parts of LONGEST_LINE in which the end of a line that is left out is looked for."""
STYLES = {
    "bold red": ("_died", "_hung", "_given_up", "_failed"),
    "yellow": ("_lost", "_poisoned", "_retried", "_resized", "_stopped"),
    "green": ("_restarted", "_finished"),
}


def events_command(run: Path, follow: bool = False, as_json: bool = False) -> int:
    """Print the events of a run; with `follow`, wait for new ones until the run ends."""
    if not (run / EVENTS_FILE).exists() and not (follow and goes_on(run)):
        raise RunUnavailable(f"{run} holds no {EVENTS_FILE}: name the directory of a run")
    show = print_json if as_json else partial(print_event, Console(highlight=False))
    lines = FollowedLines(run / EVENTS_FILE)
    for line in lines.until_the_end(lambda: follow and goes_on(run), lambda: time.sleep(POLL_S)):
        show(line)
    return 0


class FollowedLines:
    """The complete lines of a file that another process appends to; too long ones are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> Iterator[str]:
        """Yield the lines not read yet; all of them again where the file was recreated."""
        try:
            with open_regular(self._path) as file:  # anew, because only so NFS shows what is new
                if file.seek(0, os.SEEK_END) < self._read:
                    self._read = 0
                file.seek(self._read)
                while (line := _whole_line(file)) is not None:
                    self._read = file.tell()
                    if line:
                        yield line[:-1].decode(errors="replace")
        except FileNotFoundError:
            return

    def rest(self) -> Iterator[str]:
        """All that is left, also a last line without an end."""
        yield from self.new()
        with suppress(FileNotFoundError), open_regular(self._path) as file:
            file.seek(self._read)
            if part := file.read(LONGEST_LINE):
                yield part.decode(errors="replace")

    def until_the_end(self, more: Callable[[], bool], wait: Callable[[], None]) -> Iterator[str]:
        """Yield all lines, and new ones as long as there may be `more`."""
        while True:
            again = more()  # checked first, so that the last lines are not missed
            yield from self.new()
            if not again:
                return
            wait()


def _whole_line(file: BinaryIO) -> bytes | None:
    """Return the next line with its end, empty if it is too long; None if it has no end yet.

    Raises UnusableFile for a line that is as long as none of a run.
    """
    line = file.readline(LONGEST_LINE)
    if line.endswith(b"\n"):
        return line
    for _ in range(MOST_PARTS):
        if len(line) < LONGEST_LINE:
            return None
        line = file.readline(LONGEST_LINE)
        if line.endswith(b"\n"):
            return b""
    raise UnusableFile(None, "it has a line without an end")


def print_event(console: Console, line: str) -> None:
    """Print an event as a human-readable line."""
    if (event := event_of(line)) is not None:
        console.print(event_line(event), soft_wrap=True)


def print_json(line: str) -> None:
    """Print an event as its JSON object, unmodified."""
    if event_of(line) is not None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def event_line(event: dict[str, Any]) -> Text:
    """Format an event: time, kind, actor, detail, then its further fields."""
    kind = str(event.get("event", ""))
    parts: list[tuple[str, str]] = [
        (f"{clock(event.get('time'))}  ", "dim"),
        (f"{plain_text(kind):<16}  ", _style(kind)),
        (f"{plain_text(str(event.get('actor', ''))):<16}  ", "bold"),
        (plain_text(str(event.get("detail", "")), LONGEST), ""),
    ]
    fields = (f"  {plain_text(k)}={plain_text(str(v), LONGEST)}" for k, v in further(event))
    text = Text.assemble(*parts, ("".join(fields), "dim"))
    text.rstrip()
    return text


def further(event: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the fields that add information to the event's detail."""
    fields = event.get("fields")
    named = fields.items() if isinstance(fields, dict) else ()
    return [(str(name), value) for name, value in named if value != event.get("detail")]


def event_of(line: str) -> dict[str, Any] | None:
    """Return the object of a line; None for a line truncated by its writer's death."""
    try:
        event = parsed_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def clock(seconds: Any) -> str:
    """Format a time of an event, in this machine's zone."""
    try:
        return datetime.fromtimestamp(float(seconds)).strftime("%H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return "--:--:--"


def _style(kind: str) -> str:
    return next((style for style, ends in STYLES.items() if kind.endswith(ends)), "cyan")

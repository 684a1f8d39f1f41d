"""How a run that is not live ended: what happened, when, and the command that resumes it.

Reads the files of the run directory only. Their text may be a stranger's: it is shown as plain
text.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from composer_mesh.configs.regular_files import UnusableFile
from composer_mesh.services.directory.report import ABOUT_EVALUATION_FILE
from composer_mesh.services.directory.resume import called, may_be_resumed, resume_command
from composer_mesh.services.directory.status import (
    ENDED,
    EVENTS_FILE,
    goes_on,
    read_status,
)
from composer_mesh.services.inspection.events_command import FollowedLines, event_of
from composer_mesh.services.inspection.page import plain_text

Event = dict[str, Any]
State = Literal["finished", "stopped", "failed", "killed"]
FINAL = tuple(f"run_{state}" for state in sorted(ENDED))
LONGEST_REASON = 600


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    A `killed` run's controller is gone without a last event. `reason` is the text of the last
    event: why a run failed, and for a stopped or killed one how far it came. `time` is that of the
    last event, in seconds since 1970; None if there is none. `resume` is a command, empty for a run
    that cannot be resumed.
    """

    run: Path
    state: State
    reason: str
    time: float | None
    resume: str

    def lines(self) -> Iterator[str]:
        """Yield what happened, and what to do next."""
        at = "" if self.time is None else f" on {day_and_time(self.time)}"
        reason = f": {self.reason}" if self.reason else ""
        yield f"{self.run} is not running: it {VERBS[self.state]}{at}{reason}"
        if self.resume:
            yield f"resume it with: {self.resume}"
        if self.state == "finished":
            yield f"evaluate it with: composer-mesh eval {shlex.quote(str(self.run))}"
        if self.state in ("failed", "killed"):
            yield f"its last events: composer-mesh events {shlex.quote(str(self.run))}"


VERBS = {
    "finished": "finished",
    "stopped": "ended",
    "failed": "failed",
    "killed": "was killed, or its machine went down, after its last event",
}


def day_and_time(seconds: float) -> str:
    """Format a time in seconds since 1970 as day and time of this machine's zone."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "an unknown day"


def ending_of(run: Path) -> Ending | None:
    """Return how a run ended.

    None for one that is live or starting, where there is no run, and for events that no run wrote.
    """
    if goes_on(run) or not may_be_resumed(run):
        return None
    try:
        last, final = _last_events(run)
    except UnusableFile:  # `verify` says what is wrong with it
        return None
    status, shown = read_status(run), final or last or {}
    state = str(final["event"]).removeprefix("run_") if final else "killed"
    reason = plain_text(str(shown.get("detail", "")), LONGEST_REASON)
    if final is None:
        done = f"step {status.step} of {status.steps}, " if status else ""
        reason = f"{done}last event {plain_text(str(shown.get('event', 'none')))}"
    time, is_evaluation = shown.get("time"), (run / ABOUT_EVALUATION_FILE).exists()
    return Ending(
        called(run),
        state,  # type: ignore[arg-type]  # one of FINAL
        reason,
        time if isinstance(time, float) else None,
        "" if state == "finished" or is_evaluation else resume_command(run),
    )


def _last_events(run: Path) -> tuple[Event | None, Event | None]:
    """Return the last event of a run, and the one that ended its last session."""
    last: Event | None = None
    final: Event | None = None
    for event in filter(None, map(event_of, FollowedLines(run / EVENTS_FILE).rest())):
        last = event
        if event.get("event") in FINAL:
            final = event
        elif event.get("event") == "run_started":
            final = None  # of an earlier session
    return last, final

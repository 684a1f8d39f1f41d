"""Terminal output of a run: a live page, or one plain line per step without a terminal.

Only displays what is passed to it: reads no files, queries no actors and stores no records. `page`
renders it.
"""

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.directory.status import ActorStatus
from composer_mesh.services.inspection.events_command import clock
from composer_mesh.services.inspection.page import (
    TRAINING,
    PageData,
    page_of,
    plain_line,
    plain_text,
)

REFRESH_S = 0.25
QUIET_S = 8.0
QUIET_TRAINING_S = 60.0
"""Longest silence, in seconds, while a run is prepared and while it trains, where a step may take
minutes and prints its own line."""
MOST_BUSY = 3
LONGEST_HINT = 5000
LONGEST_WARNING = 1000


class RunConsole(Console):
    """A console that outlives the reader of its pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Discard what is written from now on; raises BrokenPipeError once."""
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more")


class Silence:
    """Decides when a line says that a silent phase continues, and what it says.

    The first one comes after `QUIET_S` seconds without a line, `QUIET_TRAINING_S` while a run
    trains; the next one after twice as long.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since, self._patience_s = now(), QUIET_S

    def broken(self, phase: str) -> None:
        """Note that a line was printed."""
        self._since = self._now()
        self._patience_s = QUIET_TRAINING_S if phase == TRAINING else QUIET_S

    def report(self, phase: str, actors: Sequence[ActorStatus]) -> str:
        """Return what the busy actors do if a line is due, else an empty text."""
        silent_s = self._now() - self._since
        if silent_s < self._patience_s:
            return ""
        self._patience_s = 2 * silent_s
        busy = [f"{one.name} {one.activity}" for one in actors if one.state == "busy"]
        more = [f"and {len(busy) - MOST_BUSY} more"] if len(busy) > MOST_BUSY else []
        doing = plain_text("; ".join([*busy[:MOST_BUSY], *more]))
        return f"progress {phase}, {silent_s:.0f} s{': ' if doing else ''}{doing}"


class RunView:
    """The terminal output of one run, as a context manager; thread-safe.

    A run does not end with its display: `failure` says why nothing is shown, empty if all is.

    `ceiling_usd` is the teachers' budget limit, None where no teachers are queried.

    On a terminal the page is redrawn after an update, at most every quarter of a second, and at
    least once a second for its clock. Elsewhere each update is printed as one line. A thread writes
    both, since a pipe that nobody reads and a terminal that is held up let a writer wait.

    Each line begins with its time. In a phase that prints nothing for `QUIET_S` seconds, a line
    says what the busy actors do; the next one comes after twice as long.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        *,
        transport: str = "",
        ceiling_usd: float | None = None,
        console: Console | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.failure = ""
        self._now, self._silence = now, Silence(now)
        self._console = console or RunConsole()
        self._shown = PageData(
            plain_text(name), steps, plain_text(transport), time.monotonic(), ceiling_usd
        )
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._lines: SimpleQueue[Text | None] = SimpleQueue()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if _can_redraw(self._console):
            # Rich's own refresh thread is not joined on stop; the one below is.
            live = Live(console=self._console, auto_refresh=False, get_renderable=lambda: self)
            self._live = live
            self._draw(lambda: live.start(refresh=True))
        write = self._print_lines if self._live is None else self._redraw
        self._thread = threading.Thread(target=write, name="view", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last state and restore the terminal; a second call does nothing."""
        self._closed.set()
        self._changed.set()
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._draw(self._live.stop)
        self._thread = self._live = None

    def update(self, step: Mapping[str, Any]) -> None:
        """Show the metrics of a finished step."""
        with self._lock:
            self._shown.last = dict(step)
            reward = step.get("reward/mean")
            if reward is not None and math.isfinite(reward):
                self._shown.rewards.append(float(reward))
        self._tell(plain_line(step, self._shown.steps))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show a held-out evaluation."""
        with self._lock:
            self._shown.evaluations.append(evaluation)
        (low, high), temperature = evaluation.interval, evaluation.temperature
        self._tell(
            f"evaluation after_step={evaluation.step} success={evaluation.success:.3f}"
            f" interval_95={low:.3f}..{high:.3f} episodes={evaluation.episodes}"
            f" temperature={'-' if temperature is None else f'{temperature:g}'}"
            f" decoding={evaluation.decoding.partition(' ')[0] or '-'}"
        )

    def phase(self, text: str) -> None:
        """Show the run's current phase."""
        with self._lock:
            self._shown.phase = plain_text(text)
        self._tell(f"phase {plain_text(text)}")

    def event(self, text: str) -> None:
        """Show an event."""
        with self._lock:
            self._shown.events.append((self._shown.elapsed_s, plain_text(text)))
        self._tell(f"event {plain_text(text)}")

    def warning(self, text: str) -> None:
        """Show an event that reports a configured part without effect; its kind comes first."""
        shown = plain_text(text, LONGEST_WARNING)
        with self._lock:
            self._shown.warnings.pop(kind := shown.partition(" ")[0], None)
            self._shown.warnings[kind] = (self._shown.elapsed_s, shown)
        self._tell(f"warning {shown}")

    def hints(self, commands: Sequence[str]) -> None:
        """Show the commands for inspecting the run, once: above the page, or as one line."""
        shown = [plain_text(command, LONGEST_HINT) for command in commands]
        if self._live is None:
            self._tell(f"event look_into_it {'; '.join(shown)}")
        else:
            for command in shown:
                self._print(Text(command, style="dim"))

    def transport(self, text: str) -> None:
        """Show the transport of bulk tensors."""
        with self._lock:
            self._shown.transport = plain_text(text)
        self._tell(f"transport {plain_text(text)}")

    def actors(self, rows: Sequence[ActorStatus]) -> None:
        """Show the actors' states; without a live page, only what they do in a silent phase."""
        with self._lock:
            self._shown.actors = tuple(rows)
        self._changed.set()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the current page for the given width."""
        with self._lock:
            page = page_of(self._shown, options.max_width)
        yield page

    def _tell(self, line: str) -> None:
        self._changed.set()
        self._silence.broken(self._shown.phase)
        if self._live is None and not self._closed.is_set():
            self._lines.put(self._line(line))

    def _line(self, line: str) -> Text:
        known = f"{clock(self._now())} {line}".encode(self._console.encoding, "backslashreplace")
        return Text(known.decode(self._console.encoding))

    def _print_lines(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=REFRESH_S)
            except Empty:
                with self._lock:
                    report = self._silence.report(self._shown.phase, self._shown.actors)
                if report:
                    self._print(self._line(report))
                continue
            if line is None:
                return
            self._print(line)

    def _print(self, text: Text) -> None:
        self._draw(lambda: self._console.print(text, soft_wrap=True))

    def _draw(self, draw: Callable[[], object]) -> None:
        """Write to the display, or note why it takes nothing: a full disk, a closed terminal."""
        try:
            draw()
        except OSError as error:
            self.failure = self.failure or str(error)

    def _redraw(self) -> None:
        while not self._closed.wait(REFRESH_S):
            self._changed.wait(1 - REFRESH_S)
            self._changed.clear()
            if self._live is not None and not self._closed.is_set():
                self._draw(self._live.refresh)


def _can_redraw(console: Console) -> bool:
    utf = console.encoding.lower().startswith("utf")
    return console.is_terminal and not console.is_dumb_terminal and utf

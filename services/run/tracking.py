"""The trackers of a run: they receive each step and evaluation that its display receives.

None of them is waited for while the run continues. What they tell becomes events of the run.

What a run leaves when it ends: its summary, printed and written, and its reward curve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_mesh.configs.schema import Config
from composer_mesh.configs.tracking import TrackerSection
from composer_mesh.mesh.supervision import Recorder
from composer_mesh.services.directory.report import (
    METRICS_FILE,
    TIMELINE_FILE,
    Evaluation,
    read_metrics,
    summary_table,
    write_summary,
)
from composer_mesh.services.directory.status import ENDED, EVENTS_FILE, RunProgress
from composer_mesh.services.inspection.events_command import FollowedLines, event_of
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.steps.ports import Watcher
from composer_mesh.services.trackers.delivery import Delivery, Names, of_evaluation, trained_tokens
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep, Tracker, make_tracker

CURVE_FILE = "reward.png"


def final_report(
    output: Path,
    name: str,
    *,
    progress: RunProgress,
    configured: Sequence[str],
    evaluations: Sequence[Evaluation],
    rest: Mapping[str, Any],
) -> None:
    """Write and print the summary of a run, and draw its curve; raises OSError."""
    summary = write_summary(
        output,
        wall_s=progress.wall_s,
        configured=configured,
        evaluations=evaluations,
        restarts=progress.restarts,
        sessions=progress.sessions,
        rest=rest,
    )
    # Imported late, since plotting is not needed before the end.
    from composer_mesh.services.directory.curve import Death, draw_reward_curve

    curve = output / CURVE_FILE
    metrics = read_metrics(output / METRICS_FILE)
    deaths = [Death(*one) for one in deaths_of(output)]
    draw_reward_curve(metrics, curve, evaluations=evaluations, deaths=deaths, title=name)
    console = Console()
    console.print(summary_table(name, summary))
    console.print(f"reward curve: {curve}", markup=False, highlight=False, soft_wrap=True)


ENDS = frozenset(f"run_{state}" for state in ENDED)
KILLED = "Killed(sig=9)"
LONGEST_NAME = 40


def deaths_of(run: Path) -> list[tuple[int, str]]:
    """Return each process of a run that died: the steps that were done by then, and its name.

    A controller has died where a session has no last event. Without a timeline the step is 0.
    """
    died: list[tuple[float, str]] = []
    last: dict[str, Any] = {}
    for event in _lines(run / EVENTS_FILE):
        kind, when = event.get("event"), event.get("time")
        if kind == "actor_died" and isinstance(when, int | float):
            how = "killed" if KILLED in str(event.get("detail")) else "died"
            died.append((when, f"{plain_text(str(event.get('actor')), LONGEST_NAME)} {how}"))
        elif kind == "run_started" and last.get("event", kind) not in (kind, *ENDS):
            died += [(when, "controller killed")] if isinstance(when, int | float) else []
        last = event
    if not died:
        return []
    steps = [
        (end, step)
        for line in _lines(run / TIMELINE_FILE)
        if isinstance(end := line.get("ended"), int | float)
        and isinstance(step := line.get("step"), int)
    ]
    return [
        (max((step for end, step in steps if end <= when), default=0), label)
        for when, label in died
    ]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return (found for line in FollowedLines(file).new() if (found := event_of(line)) is not None)


FOLDER = "trackers"


class RunTrackers:
    """The trackers of one run, from `start` to `close`, on one event loop."""

    def __init__(
        self,
        config: Config,
        root: Path,
        record: Recorder,
        make: Callable[[TrackerSection], Tracker] = make_tracker,
    ) -> None:
        self._config, self._root, self._record, self._make = config, root, record, make
        self._deliveries: list[tuple[TrackerSection, Delivery]] = []
        self._names = Names()

    async def start(self, past: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Start every tracker on its thread; `past` returns the metrics of a resumed run."""
        if not self._config.tracking:
            return
        self._names = Names(await asyncio.to_thread(lambda: trained_tokens(past())))
        loop, config = asyncio.get_running_loop(), self._config.model_dump(mode="json")
        for section in self._config.tracking:
            run = TrackedRun(self._config.run.name, self._root / FOLDER / section.title, config)
            tell = partial(self._tell, loop, section.title)
            made = partial(self._make, section)
            self._deliveries.append((section, Delivery(made, run, section.queue, tell)))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Offer a step's metrics to every tracker."""
        if self._deliveries:
            values = self._names.of_step(metrics)
            self._offer(TrackedStep(int(metrics["step"]), time.time(), values, dict(metrics)))

    def evaluation(self, evaluation: Evaluation) -> None:
        """Offer an evaluation to every tracker."""
        if self._deliveries:
            about = (evaluation.interval, evaluation.episodes, evaluation.tasks)
            values = of_evaluation(evaluation.success, *about)
            self._offer(TrackedStep(evaluation.step, time.time(), values))

    async def close(self, state: str) -> None:
        """Let each tracker take the rest. Waits for the slowest, at most its `finish_s`."""
        ends = [partial(one.close, state, section.finish_s) for section, one in self._deliveries]
        self._deliveries = []
        await asyncio.gather(*(asyncio.to_thread(end) for end in ends))

    def _offer(self, step: TrackedStep) -> None:
        for _, delivery in self._deliveries:
            delivery.offer(step)

    def _tell(self, loop: asyncio.AbstractEventLoop, name: str, kind: str, text: str) -> None:
        """Record an event, from any thread; one that comes after the run is dropped."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._record, kind, name, text)


class TrackedView:
    """The display of a run that also passes on its figures to the trackers."""

    def __init__(self, view: Watcher, trackers: RunTrackers) -> None:
        self._view, self._trackers = view, trackers

    def update(self, step: Mapping[str, Any]) -> None:
        self._view.update(step)
        self._trackers.step(step)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._view.evaluation(evaluation)
        self._trackers.evaluation(evaluation)

    def phase(self, text: str) -> None:
        self._view.phase(text)

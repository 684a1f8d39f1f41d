"""Every implementation of the port `Watcher` keeps its contract: the fakes, and `RunView`."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import StringIO
from typing import Any, TextIO

import pytest
from controller_world import World
from fake_stored_training import Trainer
from rich.console import Console

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.directory.report import Evaluation
from composer_mesh.services.inspection.view import RunConsole, RunView
from composer_mesh.services.steps.ports import Watcher

FULL_PIPE = 1 << 12
ODD_STEPS: tuple[dict[str, Any], ...] = (
    {"step": 1},
    {"step": 2, "reward/mean": math.nan, "loss/total": None, "loss/sdpo": None},
    {"step": 3, "lag/max": math.inf, "loss/total": -math.inf, "more": ["of", "anything"]},
)


def report(watcher: Watcher) -> None:
    """Everything that a run may tell."""
    for step in ODD_STEPS:
        watcher.update(step)
    watcher.evaluation(Evaluation(0, 0.0, 0))
    watcher.evaluation(Evaluation(3, 1.0, 8))
    for text in ("training", "", "a\nb\x1b[2J [red]\ud800", "x" * 10_000):
        watcher.phase(text)


def shown(console: Console, until: ExitStack) -> RunView:
    return until.enter_context(RunView("run", 3, console=console))


def on_a_terminal(until: ExitStack) -> RunView:
    return shown(Console(file=StringIO(), force_terminal=True, width=80, _environ={}), until)


def on_a_full_disk(until: ExitStack) -> RunView:
    return shown(RunConsole(file=until.enter_context(full_disk())), until)


def on_a_terminal_that_is_gone(until: ExitStack) -> RunView:
    file = until.enter_context(full_disk())
    return shown(RunConsole(file=file, force_terminal=True, width=80, _environ={}), until)


def on_a_closed_pipe(until: ExitStack) -> RunView:
    reading, writing = os.pipe()
    os.close(reading)
    return shown(RunConsole(file=until.enter_context(writing_to(writing))), until)


def on_a_pipe_that_nobody_reads(until: ExitStack) -> RunView:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, FULL_PIPE)
    os.write(writing, b"x" * FULL_PIPE)
    file = until.enter_context(writing_to(writing))
    view = shown(RunConsole(file=file), until)
    until.callback(os.close, reading)  # before the view is closed, which writes what is left
    return view


def full_disk() -> AbstractContextManager[TextIO]:
    return writing_to(os.open("/dev/full", os.O_WRONLY))


@contextmanager
def writing_to(descriptor: int) -> Iterator[TextIO]:
    """A file whose last bytes may be lost."""
    file = os.fdopen(descriptor, "w")
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


IMPLEMENTATIONS: dict[str, Callable[..., Watcher]] = {
    "of the controller's world": lambda _, chat, task: World(task, chat),
    "of stored steps": lambda *_: Trainer(),
    "RunView": lambda until, *_: shown(Console(file=StringIO()), until),
    "RunView on a terminal": lambda until, *_: on_a_terminal(until),
    "RunView on a full disk": lambda until, *_: on_a_full_disk(until),
    "RunView on a terminal that is gone": lambda until, *_: on_a_terminal_that_is_gone(until),
    "RunView on a closed pipe": lambda until, *_: on_a_closed_pipe(until),
    "RunView on a pipe that nobody reads": lambda until, *_: on_a_pipe_that_nobody_reads(until),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def watcher(request: Any, tokenizer: Any, toolbox: Any) -> Iterator[Watcher]:
    with ExitStack() as until:
        yield IMPLEMENTATIONS[request.param](until, ChatFormat(tokenizer, toolbox.tools), toolbox)


def test_a_watcher_takes_every_report_and_neither_waits_nor_raises(watcher: Watcher) -> None:
    for _ in range(20):  # more than a pipe takes
        report(watcher)


def test_a_watcher_leaves_what_it_is_told_as_it_is(watcher: Watcher) -> None:
    step = {"step": 1, "reward/mean": 0.5}
    watcher.update(step)
    assert step == {"step": 1, "reward/mean": 0.5}
    step.clear()
    watcher.phase("training")


def test_a_view_that_has_been_closed_takes_reports() -> None:
    with RunView("run", 3, console=Console(file=StringIO())) as view:
        pass
    report(view)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (on_a_full_disk, "No space left on device"),
        (on_a_terminal_that_is_gone, "No space left on device"),
        (on_a_closed_pipe, "nobody reads the output any more"),
    ],
)
def test_a_view_says_why_nothing_is_shown(
    output: Callable[[ExitStack], RunView], reason: str
) -> None:
    with ExitStack() as until:
        view = output(until)
        report(view)
        view.close()
        assert reason in view.failure

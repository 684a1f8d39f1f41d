"""A run that one, two or three signals end in each of its phases: it keeps what the first promised.

The command is the real one, with its store, its controller and what it writes at the end; only the
mesh is a world of fakes, and each phase delivers the signals itself, at every await that it has.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from controller_world import World, controller_of
from repetition import crossed

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.run.assembly import TrainingRun, train_command
from composer_mesh.services.run.mesh import RunMesh
from composer_mesh.services.schedule.stopping import CommandSignals
from composer_mesh.tasks.toolbox import ToolboxTask

STEPS = 2
INT, TERM = signal.SIGINT, signal.SIGTERM
Case = tuple[str, tuple[signal.Signals, ...]]
SERIES: list[Case] = [("await", (INT,)), ("await", (TERM, INT)), ("phase", (INT, TERM, INT))]
"""Signals that come an await apart, or a phase apart."""
MORE: list[Case] = [("await", (TERM,)), ("await", (INT, INT, INT)), ("phase", (TERM, TERM))]
BEFORE = ("claimed", "starting actors", "mesh", "loading", "begin", "train", "pull", "save")
"""Phases in which a signal ends the run before its time; `begin` is the first evaluation's."""
AFTER = ("closing the mesh", "stopping actors", "summary")
"""Phases of a run that has done all its work."""


class Signalled:
    """Delivers signals from the moment when the run enters a phase: one at each await, or each
    phase, that follows; all that are left come with the summary."""

    def __init__(self, phase: str, each: str, numbers: Sequence[int]) -> None:
        self.phase, self.left, self.each = phase, list(numbers), each
        self.now = 0.0
        self.signals = CommandSignals(clock=self._clock)
        self.signals.hold()
        self.entered: set[str] = set()

    def _clock(self) -> float:
        self.now += 10.0  # so far apart that each one is a wish of its own
        return self.now

    def enter(self, phase: str) -> None:
        """A phase, or a moment of it."""
        new = phase not in self.entered
        self.entered.add(phase)
        if self.phase in self.entered and self.left and (new or self.each == "await"):
            self.signals(self.left.pop(0))

    async def within(self, phase: str) -> None:
        """A phase that waits."""
        for _ in range(5):
            self.enter(phase)
            await asyncio.sleep(0)

    def end(self, phase: str) -> None:
        """A phase of which nobody can hear."""
        self.enter(phase)
        while self.phase in self.entered and self.left:
            self.signals(self.left.pop(0))


class SignalledWorld(World):
    """A world whose ports are phases."""

    on: Signalled

    async def pause(self, port: str, session: str = "") -> None:
        await self.on.within(port)


class PhaseView:
    """A view whose phases are phases."""

    def __init__(self, on: Signalled, view: RunView) -> None:
        self._on, self._view = on, view

    def phase(self, text: str) -> None:
        self._on.enter(text)
        self._view.phase(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class FakeMesh:
    """Actors that are only closed."""

    closed = False
    restarts = 0

    def __init__(self, on: Signalled) -> None:
        self._on = on

    async def close(self) -> None:
        await self._on.within("closing the mesh")
        self.closed = True


class FakeWatch:
    """Looks at nothing; keeps the last state of the run."""

    state = ""

    async def open(self, *_: object) -> None:
        await asyncio.sleep(0)

    @asynccontextmanager
    async def over(self, _mesh: object) -> AsyncIterator[None]:
        yield

    async def ended(self, state: str) -> None:
        self.state = state


class FakeRun(TrainingRun):
    """A run whose mesh is a world of fakes."""

    def __init__(self, world: SignalledWorld, *arguments: Any) -> None:
        self.world, self.on = world, world.on
        config, store, view, resumed = arguments
        super().__init__(config, store, cast(Any, PhaseView(self.on, view)), resumed)
        self.on.enter("claimed")
        self.watch = FakeWatch()
        self._watch = cast(Any, self.watch)
        self.mesh: FakeMesh | None = None

    @property
    def evaluations(self) -> list[Any]:
        self.on.end("summary")
        return super().evaluations

    async def _start_mesh(self, _config: Config, _host: MeshHost) -> Any:
        await self.on.within("mesh")
        self.mesh = FakeMesh(self.on)
        return self.mesh

    async def _train_on(self, _mesh: RunMesh) -> None:
        await self.on.within("loading")
        controller = self.controller = controller_of(self.world, self.config)
        controller.stopping = self.stopping
        await controller.run()


class Played:
    """A run that was signalled, and what is left of it."""

    def __init__(self, root: Path, world: SignalledWorld, config: Config) -> None:
        self.root, self.on = root, world.on
        runs: list[FakeRun] = []

        def make_run(*arguments: Any) -> FakeRun:
            runs.append(FakeRun(world, *arguments))
            return runs[-1]

        self.status = train_command(config, root, self.on.signals, make_run=make_run)
        [self.run] = runs

    @property
    def events(self) -> list[str]:
        lines = (self.root / "events.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]

    def check_the_promise(self) -> None:
        """What every first signal promises, whatever comes after it."""
        assert self.on.left == [], f"{self.on.phase} is none of {self.on.entered}"
        assert self.run.mesh is None or self.run.mesh.closed
        assert "stopping actors" in self.on.entered
        assert "steps" in json.loads((self.root / "summary.json").read_text())
        assert (self.root / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def play(
    tmp_path: Path, build_config: Any, tokenizer: Any, toolbox: ToolboxTask
) -> Callable[[str, Case], Played]:
    sections = {"run": {"name": "unit", "seed": 3, "steps": STEPS}, "eval": {"episodes": 2}}
    config = build_config(**sections, trainer={"checkpoint_every": 1})

    def played(phase: str, case: Case) -> Played:
        world = SignalledWorld(toolbox, ChatFormat(tokenizer, toolbox.tools))
        world.on = Signalled(phase, *case)
        return Played(tmp_path / "run", world, config)

    return played


CASES = [*crossed(BEFORE, SERIES), *crossed(["train"], MORE)]


@pytest.mark.parametrize(("phase", "case"), CASES)
def test_any_signals_in_any_phase_leave_a_summary_and_the_first_ones_status(
    phase: str, case: Case, play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    played = play(phase, case)
    played.check_the_promise()
    assert played.status == 128 + case[1][0]
    assert (played.events[-1], played.run.watch.state) == ("run_stopped", "stopped")
    said = capsys.readouterr()
    assert said.err == ""
    assert "a resume continues from" in said.out


@pytest.mark.parametrize(("phase", "case"), crossed(AFTER, SERIES))
def test_signals_after_the_work_is_done_change_nothing(phase: str, case: Case, play: Any) -> None:
    played = play(phase, case)
    played.check_the_promise()
    assert played.status == 0
    assert (played.events[-1], played.run.watch.state) == ("run_finished", "finished")
    assert played.run.world.trained == STEPS


async def test_whoever_cancels_a_taking_down_waits_for_its_end() -> None:
    ended, entered = list[bool](), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            entered.set()
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    taking_down = asyncio.create_task(cancel_and_wait([task]))
    await entered.wait()
    taking_down.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking_down
    assert ended == [True]

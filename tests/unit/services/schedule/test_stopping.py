"""How a run is asked to stop: by a signal or a command, with a checkpoint or at once.

The signals of a command: which one raises, who hears them, and how a hanging one is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from composer_mesh.services.schedule.stopping import (
    GRACE_S,
    KILL_AFTER_S,
    STOPPED,
    CommandSignals,
    Interrupted,
    Stopping,
    StopRequested,
    grace_s,
    until_interrupted,
)


class Work:
    """Something that heeds a stop; its checkpoint takes until the gate opens."""

    def __init__(self, heeds: bool = True) -> None:
        self.stopping, self.gate = Stopping(), asyncio.Event()
        self.begun, self.asked = asyncio.Event(), asyncio.Event()
        self.heeds, self.saved = heeds, False
        self.now = 0.0
        self.signals = CommandSignals(clock=lambda: self.now)

    async def live(self) -> int:
        self.stopping.finishes_step = self.heeds
        self.begun.set()
        try:
            await self.stopping.unless(asyncio.Event().wait())
        except StopRequested:
            self.asked.set()
            await self.gate.wait()
            self.saved = True
        self.stopping.left()
        return STOPPED

    async def started(self, patience_s: float = GRACE_S) -> asyncio.Future[int]:
        whole = until_interrupted(self.live(), self.signals, self.stopping, patience_s)
        running = asyncio.ensure_future(whole)
        await self.begun.wait()
        return running

    async def signalled(self, *numbers: int, patience_s: float = GRACE_S) -> int:
        """The exit status when signals come, one long after the other."""
        running = await self.started(patience_s)
        for number in numbers:
            self.signals(number)
            self.now += 10
            if number == signal.SIGTERM and self.heeds:
                heard = asyncio.ensure_future(self.asked.wait())
                await asyncio.wait([heard, running], return_when=asyncio.FIRST_COMPLETED)
                heard.cancel()
        return await running


async def test_sigterm_waits_for_the_checkpoint() -> None:
    work = Work()
    work.gate.set()
    assert await work.signalled(signal.SIGTERM) == 143
    assert work.saved


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_it(second: int) -> None:
    work = Work()
    assert await work.signalled(signal.SIGTERM, second) == 143
    assert not work.saved


async def test_sigterm_again_at_once_is_the_same_wish() -> None:
    work = Work()
    running = await work.started()
    for _ in range(2):
        work.signals(signal.SIGTERM)
        await work.asked.wait()
    work.gate.set()
    assert await running == 143
    assert work.saved


async def test_sigint_ends_at_once() -> None:
    work = Work()
    work.gate.set()
    assert await work.signalled(signal.SIGINT) == 130
    assert not work.asked.is_set()


async def test_nobody_waits_longer_for_a_checkpoint_than_was_said() -> None:
    work = Work()
    assert await work.signalled(signal.SIGTERM, patience_s=0.0) == 143
    assert not work.saved


async def test_what_has_nothing_to_finish_ends_at_once() -> None:
    work = Work(heeds=False)
    assert await work.signalled(signal.SIGTERM) == 143
    assert not work.asked.is_set()


async def test_a_command_stops_as_a_signal_does_and_further_ones_change_nothing() -> None:
    work = Work()
    running = await work.started()
    assert work.stopping.ask()
    work.gate.set()
    assert await running == STOPPED
    assert work.saved
    assert not work.stopping.ask()


async def test_a_command_may_ask_for_the_end_at_once() -> None:
    work = Work()
    running = await work.started()
    assert not work.stopping.ask(now=True)
    assert await running == STOPPED
    assert not work.asked.is_set()


async def test_a_cancellation_that_nobody_asked_for_is_none_of_our_ends() -> None:
    work = Work()
    running = await work.started()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


class Hangs:
    """Waits for nothing, until it is cancelled."""

    ended = False

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True


async def test_what_is_left_ends_at_last_and_what_is_done_counts() -> None:
    stopping = Stopping()

    async def done() -> int:
        stopping._requested.set()
        return 3

    assert await stopping.unless(done()) == 3
    left = Hangs()
    with pytest.raises(StopRequested):
        await stopping.unless(left.hang())
    assert not left.ended  # what shares something with it must not notice yet
    await stopping.close()
    assert left.ended
    with pytest.raises(StopRequested):
        stopping.check()


@pytest.mark.plugins
@pytest.mark.parametrize(("given", "left"), [(120, 90.0), (40, 20.0), (600, 570.0)])
def test_slurm_says_how_long_a_checkpoint_may_take(
    build_config: Any, given: int, left: float
) -> None:
    config = build_config(cluster={"kind": "slurm", "slurm": {"grace_s": given}})
    assert grace_s(config) == left
    assert grace_s(build_config()) == GRACE_S


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_only_the_first_signal_raises_and_only_before_anything_is_started(
    number: signal.Signals, status: int
) -> None:
    signals = CommandSignals()
    with pytest.raises(Interrupted) as raised:
        signals(number)
    assert raised.value.status == signals.status == status
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        signals(again)
    assert signals.status == status

    held = CommandSignals()
    held.hold()
    held(number)
    with pytest.raises(Interrupted):
        held.check()


def test_a_first_signal_that_something_swallowed_is_raised_before_the_start() -> None:
    signals = CommandSignals()
    with pytest.raises(Interrupted):
        signals(signal.SIGINT)
    with pytest.raises(Interrupted):
        signals.hold()


async def test_held_signals_are_heard_first_and_each_one_once() -> None:
    signals, heard = CommandSignals(), list[int]()
    signals.hold()
    signals(signal.SIGINT)
    with signals.delivered_to(heard.append):
        signals(signal.SIGINT)
        assert heard == []  # what listens runs on the loop, not within what it interrupts
        await asyncio.sleep(0)
        assert heard == [signal.SIGINT, signal.SIGINT]
    signals(signal.SIGINT)
    await asyncio.sleep(0)
    assert len(heard) == 2


async def test_a_real_signal_wakes_a_loop_that_sleeps() -> None:
    signals, heard = CommandSignals(), asyncio.Event()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with signals.caught(), signals.delivered_to(lambda _: heard.set()):
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await heard.wait()
    assert signals.status == 143
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_sigterm_that_several_processes_hand_on_is_one_signal() -> None:
    clock, kills = Clock(), list[float]()
    signals = CommandSignals(clock, lambda: kills.append(clock.now))
    signals.hold()
    for clock.now in (0.0, 0.5, 1.5, 40.0, 100.0):  # the second and third are the first again
        signals(signal.SIGTERM)
    assert kills == [100.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_third_signal_kills_only_what_hangs(number: signal.Signals) -> None:
    clock, kills = Clock(), list[float]()
    signals = CommandSignals(clock, lambda: kills.append(clock.now))
    signals.hold()
    signals(number)
    clock.now += 1000  # a checkpoint may take long
    signals(signal.SIGINT)
    for _ in range(5):  # impatience costs nothing
        clock.now += KILL_AFTER_S / 5
        signals(signal.SIGINT)
    assert kills == []
    clock.now += 1
    signals(signal.SIGINT)
    assert kills == [clock.now]

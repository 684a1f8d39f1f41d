"""The signals of a command: which one raises, who hears them, and how a hanging one is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from composer_mesh.services.schedule.stopping import KILL_AFTER_S, CommandSignals, Interrupted


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
    with signals.heard_by(heard.append):
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
    with signals.caught(), signals.heard_by(lambda _: heard.set()):
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

"""A call of a user's function is late only once it alone has exceeded its time."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.losses.custom_function import CustomFunctionError


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_call_has_the_whole_time_and_no_call_has_none() -> None:
    clock = Clock()
    running = RunningCall(10.0, clock)

    def call(seconds: float) -> float:
        clock.now += seconds
        running.check()
        return running.left_s()

    watched = running.watched(call, "users.loss")
    assert [watched(6.0), watched(9.0)] == [4.0, 1.0]
    clock.now += 100.0
    running.check()  # between two calls nothing is late
    assert running.left_s() == 10.0
    with pytest.raises(CustomFunctionError, match="did not return within 10 s"):
        watched(10.0)
    assert running.left_s() == 10.0


def test_a_watched_function_keeps_its_signature_and_its_error() -> None:
    def loss(inputs: object, scale: float = 1.0) -> None:
        raise ZeroDivisionError

    watched = RunningCall(1.0).watched(loss, "users.loss")
    assert inspect.signature(watched) == inspect.signature(loss)
    with pytest.raises(ZeroDivisionError):
        watched(None)


async def test_work_that_ends_in_time_gives_its_result_or_its_error() -> None:
    async def works() -> int:
        return 3

    async def fails() -> int:
        raise KeyError("x")

    assert await RunningCall(60.0).wait_for(works()) == 3
    with pytest.raises(KeyError):
        await RunningCall(60.0).wait_for(fails())


async def test_a_caller_that_is_cancelled_cancels_the_work() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.create_task(RunningCall(60.0).wait_for(waits()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await cancelled.wait()

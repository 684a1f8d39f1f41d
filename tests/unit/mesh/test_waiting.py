"""Work in a thread: a caller that is cancelled, however often, waits for the thread's end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from composer_mesh.mesh.waiting import in_thread


async def turns_of_the_loop() -> None:
    """Long enough for a cancelled task to reach its next wait."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_however_often_it_is_cancelled_a_caller_waits_until_its_thread_has_ended(
    cancels: int,
) -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        release.wait()
        ended.set()

    caller = asyncio.create_task(in_thread(work))
    try:
        await asyncio.to_thread(started.wait)
        for _ in range(cancels):
            caller.cancel()
            await turns_of_the_loop()
        assert not caller.done()
    finally:
        release.set()
        await asyncio.wait([caller])
    assert caller.cancelled()
    assert ended.is_set()


async def test_a_failure_in_the_thread_reaches_the_caller() -> None:
    def work() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        await in_thread(work)

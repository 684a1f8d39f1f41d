"""The loop of a task's code: a call that blocks it fails, others are lost, and work goes on."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import TaskTimeout
from composer_mesh.tasks.task_loop import (
    MOST_ABANDONED,
    MOST_BLOCKED,
    LoopBlocked,
    LoopLost,
    TaskLoop,
    TooManyBlocked,
)

SOON = 0.05

STARTED_S = 1.0
"""A limit that leaves a thread time to begin what it was given on a busy machine."""


async def value(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def raises() -> None:
    raise KeyError("mine")


async def test_a_call_has_its_result_or_its_error() -> None:
    loop = TaskLoop()
    assert await loop.run(value(3), 60.0) == 3
    with pytest.raises(KeyError, match="mine"):
        await loop.run(raises(), 60.0)


async def test_a_call_that_waits_is_no_block_however_long() -> None:
    loop, go_on = TaskLoop(), threading.Event()

    async def waits() -> str:
        await asyncio.to_thread(go_on.wait)
        return "done"

    waiting = asyncio.create_task(loop.run(waits(), SOON))
    for _ in range(3):
        assert await loop.run(value(1), 60.0) == 1
        await asyncio.sleep(2 * SOON)
    go_on.set()
    assert await waiting == "done"


async def test_a_call_that_blocks_fails_the_others_are_lost_and_the_next_ones_run() -> None:
    loop, released = TaskLoop(STARTED_S), threading.Event()

    async def blocks() -> None:
        released.wait()

    async def beside() -> None:
        await asyncio.Event().wait()

    innocent = asyncio.create_task(loop.run(beside(), STARTED_S))
    await asyncio.sleep(0)
    blocking = asyncio.create_task(loop.run(blocks(), STARTED_S))
    with pytest.raises(LoopBlocked, match=r"(?s)blocked its event loop.*test_task_loop\.py"):
        await blocking
    with pytest.raises(LoopLost):
        await innocent
    assert await loop.run(value(2), 60.0) == 2
    released.set()


async def test_a_cancelled_call_is_cancelled_where_it_runs() -> None:
    loop, ended = TaskLoop(), threading.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(loop.run(waits(), 60.0))
    await loop.run(value(1), 60.0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 60.0)


async def test_too_many_blocked_loops_are_a_reason_to_end_the_process() -> None:
    loop, released = TaskLoop(SOON), threading.Event()

    async def blocks() -> None:
        released.wait()

    for _ in range(MOST_BLOCKED - 1):
        with pytest.raises(LoopBlocked):
            await loop.run(blocks(), SOON)
    with pytest.raises(TooManyBlocked):
        await loop.run(blocks(), SOON)
    released.set()


async def test_too_many_functions_that_never_return_are_a_reason_to_end_the_process() -> None:
    loop, released = TaskLoop(), threading.Event()
    calls = TaskCalls(loop.in_a_thread, STARTED_S)
    failures = await asyncio.gather(
        *(loop.run(calls("waiting", released.wait), 60.0) for _ in range(MOST_ABANDONED - 1)),
        return_exceptions=True,
    )
    assert {type(one) for one in failures} == {TaskTimeout}
    with pytest.raises(TooManyBlocked):
        await loop.run(calls("waiting", released.wait), 60.0)
    with pytest.raises(TooManyBlocked, match="64 plain functions of the task did not return"):
        await loop.run(raises(), 60.0)
    assert await loop.run(value(1), 60.0) == 1  # what succeeds is not lost
    released.set()


async def test_functions_that_returned_late_are_not_counted() -> None:
    loop, released = TaskLoop(), threading.Event()
    returned = asyncio.Event()
    own = asyncio.get_running_loop()

    def waits() -> None:
        released.wait()
        own.call_soon_threadsafe(own.call_later, SOON, returned.set)

    with pytest.raises(TaskTimeout):
        await loop.run(TaskCalls(loop.in_a_thread, STARTED_S)("waiting", waits), 60.0)
    assert loop.abandoned == 1
    released.set()
    await returned.wait()
    assert loop.abandoned == 0

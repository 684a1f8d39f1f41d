"""Calls of an event loop in another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from composer_mesh.mesh.waiting import LoopThread


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    opened = LoopThread("tested")
    yield opened
    opened.close()


async def name_of_thread() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def test_a_coroutine_runs_in_the_thread_and_its_result_comes_back(thread: LoopThread) -> None:
    assert await thread.run(name_of_thread()) == "tested"
    assert threading.current_thread().name != "tested"


async def test_many_calls_at_once_each_get_their_own_result(thread: LoopThread) -> None:
    async def same(number: int) -> int:
        await asyncio.sleep(0)
        return number

    results = await asyncio.gather(*(thread.run(same(one)) for one in range(500)))
    assert results == list(range(500))


async def test_an_error_is_raised_where_the_call_waits(thread: LoopThread) -> None:
    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await thread.run(fails())


async def test_a_cancelled_call_is_cancelled_in_the_thread(thread: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(thread.run(waits()))
    assert await asyncio.to_thread(started.wait, 30)
    call.cancel()
    assert await asyncio.to_thread(ended.wait, 30)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_that_is_cancelled_in_the_thread_is_cancelled_here(thread: LoopThread) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await thread.run(cancelled())


def test_loops_one_after_another_may_call_one_thread(thread: LoopThread) -> None:
    for _ in range(3):
        assert asyncio.run(thread.run(name_of_thread())) == "tested"


def test_a_call_whose_loop_was_closed_disturbs_no_other(thread: LoopThread) -> None:
    proceed = threading.Event()
    ended = threading.Event()

    async def stubborn() -> None:
        try:
            await asyncio.to_thread(proceed.wait, 30)
        except asyncio.CancelledError:
            await asyncio.to_thread(proceed.wait, 30)
        finally:
            ended.set()

    async def gives_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread.run(stubborn())

    asyncio.run(gives_up())
    proceed.set()
    assert ended.wait(30)
    assert asyncio.run(thread.run(name_of_thread())) == "tested"


def test_a_plain_function_may_wait_for_a_coroutine(thread: LoopThread) -> None:
    assert thread.run_blocking(name_of_thread()) == "tested"

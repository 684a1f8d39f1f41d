"""Work in a thread: a caller that is cancelled, however often, waits for the thread's end.

Background tasks have an owner: what ends by an error is told at once, whoever started it.

Calls of an event loop in another thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from composer_mesh.mesh.failures import recorded_by
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.mesh.waiting import BackgroundTasks, LoopThread, in_thread, reported_to_loop


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


class Told:
    """Keeps what is told; `once` is done with the first of it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []
        self.once = asyncio.Event()

    def __call__(self, kind: str, _actor: str, detail: str, /, **_fields: Any) -> None:
        self.all.append((kind, detail))
        self.once.set()


async def fails(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def test_a_task_that_raises_is_an_event_and_one_that_ends_or_is_cancelled_is_none() -> None:
    told = Told()
    tasks = BackgroundTasks(recorded_by(told))
    tasks.start("counting", asyncio.sleep(0))
    tasks.start("waiting", asyncio.Event().wait())
    tasks.start("watching hosts", fails(OSError(5, "Input/output error")))
    await told.once.wait()
    await tasks.close()
    assert told.all == [("task_failed", "watching hosts: OSError: [Errno 5] Input/output error")]


async def test_a_task_may_be_told_to_another_than_its_owner() -> None:
    told, other = Told(), list[str]()
    tasks = BackgroundTasks(recorded_by(told))
    tasks.start("special", fails(KeyError("k")), lambda name, _: other.append(name))
    await tasks.wait()
    await asyncio.sleep(0)
    assert (other, told.all) == (["special"], [])


async def test_without_records_the_loop_is_told() -> None:
    heard = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, about: heard.append(about))
    tasks = BackgroundTasks(reported_to_loop)
    tasks.start("counting", fails(ValueError("no number")))
    await tasks.wait()
    await asyncio.sleep(0)
    assert [about["message"] for about in heard] == ["counting failed"]


async def test_what_a_run_cannot_do_without_ends_it_with_the_cause() -> None:
    supervisor, left = Supervisor(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("in order")

    guarded = asyncio.ensure_future(supervisor.guard(work()))
    await asyncio.sleep(0)
    supervisor.fail(OSError("no more descriptors"))
    supervisor.fail(OSError("a later one"))
    with pytest.raises(OSError, match="no more descriptors"):
        await guarded
    assert left == ["in order"]


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

"""The loop of a task's code: a call that blocks it fails, others are lost, and work goes on.

Marks of which thread runs which call: a step of a coroutine is marked, a wait is not.

Whatever a task's code raises is an error of that code, at once, with its line.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any

import pytest
from raised_kinds import NAMES, raised

from composer_mesh.tasks.calls import MARKS_BYTES, CallMarks, TaskCalls, current_call, read_marks
from composer_mesh.tasks.errors import TaskCodeError, TaskError, TaskTimeout
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


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.truncate(MARKS_BYTES)
        yield file


def calls_of(file: IO[bytes]) -> list[int]:
    return [mark.call for mark in read_marks(file.fileno())]


async def test_a_coroutine_is_marked_while_it_steps_and_not_while_it_waits(file: IO[bytes]) -> None:
    loop, go_on, seen = TaskLoop(marks=CallMarks(file.fileno())), asyncio.Event(), list[int]()
    own, waits = asyncio.get_running_loop(), asyncio.Event()

    async def work() -> int:
        seen.extend(calls_of(file))
        there = asyncio.Event()
        asyncio.run_coroutine_threadsafe(go_on.wait(), own).add_done_callback(
            lambda _: task_loop.call_soon_threadsafe(there.set)
        )
        task_loop = asyncio.get_running_loop()
        own.call_soon_threadsafe(waits.set)
        await there.wait()
        seen.extend(calls_of(file))
        return 5

    current_call.set(41)
    running = asyncio.create_task(loop.run(work(), 600.0))
    await waits.wait()
    while calls_of(file):  # noqa: ASYNC110  the step may still be ending in its thread
        await asyncio.sleep(0)
    go_on.set()
    assert await running == 5
    assert seen == [41, 41]


async def test_a_task_that_a_users_coroutine_starts_is_marked_as_its_call(file: IO[bytes]) -> None:
    loop = TaskLoop(marks=CallMarks(file.fileno()))

    async def inner() -> list[int]:
        await asyncio.sleep(0)
        return calls_of(file)

    async def outer() -> list[list[int]]:
        return list(await asyncio.gather(inner(), inner()))

    current_call.set(3)
    assert await loop.run(outer(), 600.0) == [[3], [3]]


async def test_a_plain_function_is_marked_with_its_thread(file: IO[bytes]) -> None:
    loop = TaskLoop(marks=CallMarks(file.fileno()))

    def function() -> bool:
        (mark,) = [one for one in read_marks(file.fileno()) if one.thread == threading.get_ident()]
        return (mark.call, mark.native_thread) == (9, threading.get_native_id())

    current_call.set(9)
    assert await loop.run(loop.in_a_thread(function), 600.0)
    assert calls_of(file) == []


async def test_errors_and_cancellations_of_a_marked_coroutine_are_those_of_a_plain_one(
    file: IO[bytes],
) -> None:
    loop = TaskLoop(marks=CallMarks(file.fileno()))
    cleaned = threading.Event()

    async def fails() -> None:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            raise KeyError("mine") from None

    async def waits(started: threading.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    with pytest.raises(KeyError, match="mine") as failed:
        await loop.run(fails(), 600.0)
    assert failed.traceback[-1].name == "fails"
    started = threading.Event()
    running = asyncio.create_task(loop.run(waits(started), 600.0))
    await asyncio.to_thread(started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(cleaned.wait)


LIMIT_S = 600.0


"""Never reached: an error that is not answered at once would end the test by its own limit."""


def plain(name: str) -> Callable[[], None]:
    def function() -> None:
        raise raised(name)

    return function


def coroutine(name: str) -> Callable[[], Any]:
    async def function() -> None:
        await asyncio.sleep(0)
        raise raised(name)

    return function


def of_a_subtask(name: str) -> Callable[[], Any]:
    async def function() -> None:
        await asyncio.gather(coroutine(name)())

    return function


@pytest.mark.parametrize("make", [plain, coroutine, of_a_subtask])
@pytest.mark.parametrize("name", NAMES)
async def test_what_a_function_raises_fails_its_call_at_once_with_its_line(
    name: str, make: Callable[[str], Callable[..., Any]]
) -> None:
    loop = TaskLoop()
    calls = TaskCalls(loop.in_a_thread, LIMIT_S)
    with pytest.raises(TaskCodeError) as failed:
        await loop.run(calls("reward 'r'", make(name)), LIMIT_S)
    assert name in str(failed.value)
    assert str(failed.value).startswith("reward 'r' failed at ")
    assert await loop.run(calls("another", lambda: 3), LIMIT_S) == 3


@pytest.mark.parametrize("name", NAMES)
async def test_a_thread_of_another_loop_carries_it_too(name: str) -> None:
    with pytest.raises(TaskCodeError, match=name):
        await TaskCalls(asyncio.to_thread, LIMIT_S)("reward", plain(name))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"KeyboardInterrupt"}))
async def test_without_threads_it_is_an_error_of_the_function_as_well(name: str) -> None:
    with pytest.raises(TaskCodeError, match=rf"{name}.*of the user"):
        await TaskCalls()("reward", plain(name))


async def test_ctrl_c_in_the_main_thread_ends_a_command_as_before() -> None:
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        await TaskCalls()("reward", plain("KeyboardInterrupt"))


async def test_an_error_from_within_a_library_names_the_line_of_the_task_that_called_it() -> None:
    async def awaits_what_was_cancelled() -> None:
        question = asyncio.ensure_future(asyncio.sleep(60))
        await asyncio.sleep(0)
        question.cancel()
        await question

    def parses() -> None:
        json.loads("{")

    loop = TaskLoop()
    for function in (awaits_what_was_cancelled, parses):
        with pytest.raises(TaskCodeError) as failed:
            await loop.run(TaskCalls(loop.in_a_thread, LIMIT_S)("reward", function), LIMIT_S)
        assert failed.value.where.startswith(f"{__file__}:")


async def test_code_that_cancels_its_own_call_fails_that_call_alone() -> None:
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    loop = TaskLoop()
    with pytest.raises(TaskError, match="cancelled"):
        await loop.run(TaskCalls(loop.in_a_thread, LIMIT_S)("reward", cancels), LIMIT_S)


@pytest.mark.parametrize("name", NAMES)
async def test_code_outside_of_a_named_function_is_the_tasks_too(name: str) -> None:
    loop = TaskLoop()
    with pytest.raises((TaskCodeError, RuntimeError, StopAsyncIteration)) as failed:
        await loop.run(coroutine(name)(), LIMIT_S)
    assert name in repr(failed.value)
    assert await loop.run(TaskCalls(loop.in_a_thread, LIMIT_S)("next", lambda: 3), LIMIT_S) == 3


async def test_a_requested_cancellation_passes_through_as_one() -> None:
    loop, started = TaskLoop(), threading.Event()

    async def waits() -> None:
        started.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(
        loop.run(TaskCalls(loop.in_a_thread, LIMIT_S)("reward", waits), LIMIT_S)
    )
    await asyncio.to_thread(started.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

"""Marks of which thread runs which call: a step of a coroutine is marked, a wait is not."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

import pytest

from composer_mesh.tasks.calls import MARKS_BYTES, CallMarks, current_call, read_marks
from composer_mesh.tasks.task_loop import TaskLoop


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

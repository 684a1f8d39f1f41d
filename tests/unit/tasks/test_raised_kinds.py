"""Whatever a task's code raises is an error of that code, at once, with its line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from raised_kinds import NAMES, raised

from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import TaskCodeError, TaskError
from composer_mesh.tasks.task_loop import TaskLoop

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

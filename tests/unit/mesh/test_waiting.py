"""Work in a thread: a caller that is cancelled, however often, waits for the thread's end.

Background tasks have an owner: what ends by an error is told at once, whoever started it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from composer_mesh.mesh.failures import recorded_by
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.mesh.waiting import BackgroundTasks, in_thread, reported_to_loop


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

"""The thread that writes: in order, all of it, and no error is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from composer_mesh.services.store.writing import WriterThread


class Broken(Exception):
    """What a job raises in these tests."""


def broken() -> None:
    raise Broken


@contextmanager
def held(writer: WriterThread) -> Iterator[None]:
    """No job is done before the end of the block."""
    gate = threading.Event()
    writer.tell(lambda: gate.wait(60))
    yield
    gate.set()


async def test_jobs_are_done_in_the_order_in_which_they_were_given() -> None:
    done: list[int] = []
    writer = WriterThread(lambda: None)
    for n in range(50):
        writer.tell(lambda n=n: done.append(n))
    assert await writer.call(lambda: len(done)) == 50
    assert done == list(range(50))
    writer.close()


async def test_the_loop_goes_on_while_a_job_is_done() -> None:
    writer = WriterThread(lambda: None)
    with held(writer):
        waiting = asyncio.create_task(writer.call(lambda: 1))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting == 1
    writer.close()


async def test_an_error_reaches_who_waits_and_nobody_else() -> None:
    writer = WriterThread(lambda: None)
    with pytest.raises(Broken):
        await writer.call(broken)
    assert await writer.call(lambda: 1) == 1
    writer.close()


async def test_an_error_that_nobody_waited_for_is_raised_by_every_later_call() -> None:
    writer = WriterThread(lambda: None)
    writer.tell(broken)
    await asyncio.gather(writer.call(lambda: 1), return_exceptions=True)
    for _ in range(2):
        with pytest.raises(Broken):
            await writer.call(lambda: 1)
    writer.close()


def test_an_error_that_nobody_has_seen_is_raised_at_the_end() -> None:
    writer = WriterThread(lambda: None)
    writer.tell(broken)
    with pytest.raises(Broken):
        writer.close()


async def test_a_cancelled_call_is_done_and_its_error_is_not_lost() -> None:
    done: list[int] = []
    writer = WriterThread(lambda: None)
    with held(writer):
        calls = [asyncio.create_task(writer.call(job)) for job in (lambda: done.append(1), broken)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    assert await writer.call(lambda: list(done)) == [1]
    with pytest.raises(Broken):
        writer.close()


def test_a_job_outlives_the_loop_that_asked_for_it() -> None:
    done: list[int] = []
    writer = WriterThread(lambda: None)

    async def ask() -> None:
        call = asyncio.create_task(writer.call(lambda: done.append(1)))
        await asyncio.sleep(0)
        call.cancel()

    with held(writer):
        asyncio.run(ask())
    writer.close()
    assert done == [1]


def test_it_rests_when_nothing_is_left_to_do() -> None:
    rested: list[int] = []
    done: list[int] = []
    writer = WriterThread(lambda: rested.append(len(done)))
    with held(writer):
        for n in range(3):
            writer.tell(lambda n=n: done.append(n))
    writer.close()
    assert rested[-1] == 3

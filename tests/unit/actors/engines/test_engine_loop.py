"""An engine behind the loop: who asks hears of it, and steps, swaps and the end never overlap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from stepped import Plain, SteppedEngine, request

from composer_mesh.actors.engines.loop import EngineLoop, EngineThread
from composer_mesh.mesh.waiting import cancel_and_wait


@asynccontextmanager
async def serving(engine: SteppedEngine) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine, EngineThread())
    task = asyncio.create_task(loop.serve())
    yield loop
    await cancel_and_wait([task])
    await loop.close()


async def test_requests_that_come_while_others_run_are_answered_too() -> None:
    async with serving(SteppedEngine()) as loop:
        first = loop.ask(request("first", new=3))
        later = [loop.ask(request(f"r{new}", new=new)) for new in (1, 5)]
        results = [await answer for answer in (first, *later)]
        again = await loop.ask(request("again", new=2))
    assert [result.request_id for result in [*results, again]] == ["first", "r1", "r5", "again"]
    assert loop.tokens == 3 + 1 + 5 + 2


async def test_new_weights_come_between_two_steps_of_a_running_request() -> None:
    reached, go_on = threading.Event(), threading.Event()
    steps = iter(range(100))

    def during() -> None:
        if next(steps) == 2:
            reached.set()
            go_on.wait()

    async with serving(SteppedEngine(during)) as loop:
        answer = loop.ask(request(new=6))
        await asyncio.to_thread(reached.wait)
        swapping = asyncio.create_task(loop.swap(Plain(4)))
        await asyncio.sleep(0)  # the task begins, and leaves its weights for the loop
        go_on.set()
        await swapping
        assert (await answer).versions == [0, 0, 0, 4, 4, 4]


async def test_an_idle_engine_takes_weights_at_once() -> None:
    async with serving(SteppedEngine()) as loop:
        await loop.swap(Plain(2))
        assert (await loop.ask(request(new=1))).versions == [2]


async def test_a_fault_of_the_engine_ends_serving() -> None:
    def break_down() -> None:
        raise ZeroDivisionError("the engine is broken")

    loop = EngineLoop(SteppedEngine(break_down), EngineThread())
    loop.ask(request())
    with pytest.raises(ZeroDivisionError, match="the engine is broken"):
        await loop.serve()
    await loop.close()


async def test_whether_work_is_left_is_seen_before_an_answer_can_bring_more() -> None:
    running = asyncio.get_running_loop()
    seen: list[bool] = []

    class Watched(SteppedEngine):
        @property
        def busy(self) -> bool:
            busy = super().busy
            if threading.current_thread() is not threading.main_thread():
                # Whatever was handed to the event loop before has its effect now.
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), running).result()
                seen.append(answer.done())
            return busy

    async with serving(Watched()) as loop:
        answer = loop.ask(request(new=1))
        await answer
    assert seen == [False]


async def test_closing_waits_for_the_step_that_is_under_way() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def during() -> None:
        reached.set()
        go_on.wait()

    engine = SteppedEngine(during)
    loop = EngineLoop(engine, EngineThread())
    task = asyncio.create_task(loop.serve())
    loop.ask(request(new=1000))
    await asyncio.to_thread(reached.wait)
    await cancel_and_wait([task])
    closing = asyncio.create_task(loop.close())
    await asyncio.sleep(0)
    closed_early = engine.closed
    go_on.set()
    await closing
    assert engine.closed
    assert engine.busy
    assert not closed_early

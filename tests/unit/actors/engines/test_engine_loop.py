"""An engine behind the loop: who asks hears of it, and steps, swaps and the end never overlap.

Closed batches from shares: whose requests came when changes nothing for the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import permutations

import pytest
from fake_host import turns
from stepped import Plain, SteppedEngine, request

from composer_mesh.actors.engines.loop import BatchRounds, EngineLoop, EngineThread
from composer_mesh.actors.engines.port import DecodingDeadlineExceeded, RequestAborted
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.generation import GenerationRequest


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


async def test_requests_of_a_sleeping_engine_wait_without_a_deadline_and_continue() -> None:
    reached, go_on = threading.Event(), threading.Event()
    steps = iter(range(100))

    def during() -> None:
        if next(steps) == 2:
            reached.set()
            go_on.wait()

    engine = SteppedEngine(during)
    async with serving(engine) as loop:
        answer = loop.ask(request(new=6))
        await asyncio.to_thread(reached.wait)
        sleeping = asyncio.create_task(loop.sleep({"b", "a"}))
        await asyncio.sleep(0)  # the task begins, and leaves its change for the loop
        go_on.set()
        await sleeping
        asked = request("later", new=1, deadline_s=60.0)
        later = loop.ask(asked)
        loop._expire(asked, later, loop._progress)
        await turns()
        assert (engine.slept, loop.asleep) == ([["a", "b"]], True)
        assert not answer.done() | later.done()
        await loop.wake(Plain(4))
        assert (await later).versions == [4]
        assert (await answer).versions == [0, 0, 0, 4, 4, 4]


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


async def test_a_cancelled_answer_aborts_its_request_and_no_other() -> None:
    engine = SteppedEngine(rows=1)
    async with serving(engine) as loop:
        given_up, other = loop.ask(request("given up", new=10**9)), loop.ask(request("other"))
        given_up.cancel()
        assert (await other).request_id == "other"
    assert (loop.aborted, engine.outstanding) == (1, 0)


async def test_a_request_that_is_sent_again_ends_the_older_one() -> None:
    async with serving(SteppedEngine()) as loop:
        older, newer = loop.ask(request("r", new=10**9)), loop.ask(request("r", new=2))
        with pytest.raises(RequestAborted, match="r was aborted: a request with the same id"):
            await older
        assert len((await newer).token_ids) == 2
        assert (await loop.ask(request("r", new=1))).token_ids == [0]
    assert loop.aborted == 1


async def test_aborting_what_is_unknown_or_answered_is_not_counted() -> None:
    async with serving(SteppedEngine()) as loop:
        await loop.ask(request("r"))
        assert not loop.abort("r", "late")
        assert not loop.abort("never", "early")
    assert loop.aborted == 0


async def test_a_request_aborted_in_its_last_step_is_not_answered() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def during() -> None:
        reached.set()
        go_on.wait()

    async with serving(SteppedEngine(during)) as loop:
        older = loop.ask(request("r", new=1))
        await asyncio.to_thread(reached.wait)
        newer = loop.ask(request("r", new=3))
        go_on.set()
        with pytest.raises(RequestAborted):
            await older
        assert len((await newer).token_ids) == 3


async def test_a_deadline_runs_from_admission_and_not_while_a_request_waits() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def during() -> None:
        reached.set()
        go_on.wait()

    async with serving(SteppedEngine(during, rows=1)) as loop:
        first = loop.ask(request("first", new=1))
        waiting = loop.ask(request("late", new=10**9, deadline_s=1e-9))
        await asyncio.to_thread(reached.wait)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert loop.outstanding - loop.engine.decoding == 1
        go_on.set()
        await first
        with pytest.raises(
            DecodingDeadlineExceeded, match="no step in 1e-09 s after its admission"
        ):
            await waiting
    assert loop.aborted == 1


async def test_a_request_that_is_decoded_is_waited_for_and_aborted_once_no_step_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, go_on = asyncio.get_running_loop(), threading.Semaphore(0)
    clocks, steps = asyncio.Queue[Callable[[], None]](), asyncio.Queue[None]()

    def call_later(_s: float, expire: Callable[[], None]) -> asyncio.TimerHandle:
        clocks.put_nowait(expire)
        return asyncio.TimerHandle(0.0, expire, (), running)

    def during() -> None:
        running.call_soon_threadsafe(steps.put_nowait, None)
        go_on.acquire()

    async with serving(SteppedEngine(during)) as loop:
        monkeypatch.setattr(running, "call_later", call_later)
        answer = loop.ask(request("r", new=10**9, deadline_s=60.0))
        expire = await clocks.get()
        await steps.get()
        go_on.release()
        await steps.get()  # the first one has ended
        expire()
        expire = await clocks.get()
        assert not answer.done()
        expire()
        with pytest.raises(DecodingDeadlineExceeded):
            await answer
        go_on.release(1000)  # the engine may not have noticed the abortion yet


async def test_a_request_within_its_deadline_is_answered() -> None:
    async with serving(SteppedEngine()) as loop:
        assert (await loop.ask(request("r", deadline_s=10**6))).request_id == "r"
    assert loop.aborted == 0


async def test_a_closed_batch_drops_prefixes_unless_it_continues_another() -> None:
    engine = SteppedEngine()
    async with serving(engine) as loop:
        await asyncio.gather(*loop.ask_together([request("a"), request("b")]))
        assert engine.dropped == 1
        await asyncio.gather(*loop.ask_together([request("a")], continues=True))
        assert engine.dropped == 1


async def test_a_closed_batch_with_a_request_that_cannot_be_served_leaves_none_behind() -> None:
    engine = SteppedEngine()
    async with serving(engine) as loop:
        with pytest.raises(ValueError, match="nothing is asked"):
            loop.ask_together([request("a", new=10**9), request("b", new=0)])
        await loop.ask(request("c"))
        assert engine.outstanding == 0


def requests(*names: str) -> list[GenerationRequest]:
    return [GenerationRequest(name, [1], 1, 1.0, 0, []) for name in names]


class Engine:
    """Keeps the order in which it is asked; answers with the name."""

    def __init__(self, broken: bool = False) -> None:
        self.asked: list[str] = []
        self.broken = broken

    def __call__(self, requests: list[GenerationRequest], _continues: bool) -> list[str]:
        if self.broken:
            raise RuntimeError("the engine has stopped")
        names = [request.request_id for request in requests]
        self.asked += names
        return names


SHARES = [["d", "a"], ["c"], ["b", "e"]]


@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_shares_in_any_order_are_one_batch_and_each_gets_its_own(
    order: tuple[int, ...],
) -> None:
    engine = Engine()
    rounds = BatchRounds(engine)
    shares = [asyncio.ensure_future(rounds.share(0, 5, requests(*SHARES[n]), False)) for n in order]
    assert await asyncio.gather(*shares) == [SHARES[n] for n in order]
    assert engine.asked == ["a", "b", "c", "d", "e"]


async def test_a_round_waits_for_its_last_share() -> None:
    engine = Engine()
    rounds = BatchRounds(engine)
    share = asyncio.ensure_future(rounds.share(0, 2, requests("a"), False))
    await turns()
    assert (share.done(), engine.asked) == (False, [])
    assert await rounds.share(0, 2, requests("b"), False) == ["b"]
    assert await share == ["a"]


async def test_a_closed_round_asks_what_it_has_and_later_shares_wait_for_nobody() -> None:
    engine = Engine()
    rounds = BatchRounds(engine)
    early = [asyncio.ensure_future(rounds.share(n, 9, requests(f"{n}"), False)) for n in range(3)]
    await turns()
    rounds.close(1)
    assert await asyncio.gather(*early[:2]) == [["0"], ["1"]]
    assert await rounds.share(1, 9, requests("late"), False) == ["late"]
    assert not early[2].done()
    rounds.close(2)
    assert await early[2] == ["2"]


async def test_a_cancelled_share_holds_up_no_other() -> None:
    rounds = BatchRounds(Engine())
    one = asyncio.ensure_future(rounds.share(0, 2, requests("a"), False))
    await turns()
    one.cancel()
    assert await rounds.share(0, 2, requests("b"), False) == ["b"]


async def test_an_error_of_the_engine_reaches_every_share() -> None:
    rounds = BatchRounds(Engine(broken=True))
    shares = [rounds.share(0, 2, requests(name), False) for name in "ab"]
    for found in await asyncio.gather(*shares, return_exceptions=True):
        assert isinstance(found, RuntimeError)

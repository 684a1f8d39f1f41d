"""Buffers that signals leave by: back-pressure, tickets, and what a new step takes back.

Signals between the loop that delivers them and the thread that trains: order, room, an end.
"""

from __future__ import annotations

import asyncio

import pytest
import torch
from fake_host import until

from composer_mesh.actors.teacher_outputs.messages import SlotPool, StepOver
from composer_mesh.actors.teacher_outputs.sources import (
    AHEAD,
    TeacherOutputBuffer,
    TeacherOutputsLost,
)
from composer_mesh.mesh.progress import PROGRESS

EMPTY = torch.zeros(0, dtype=torch.uint8)


"""A payload for which nothing need be registered with Monarch."""


async def turns(count: int = 5) -> None:
    """Let every task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_whoever_comes_when_all_buffers_are_out_waits_for_one() -> None:
    slots = SlotPool(2, 64)
    first, second = await slots.acquire(0), await slots.acquire(0)
    third = asyncio.create_task(slots.acquire(0))
    await turns()
    assert not third.done()
    assert slots.held == 2
    await slots.release(second)
    assert await third not in (first, second)
    assert slots.held == 2


async def test_tickets_are_never_used_again() -> None:
    slots, seen = SlotPool(1, 64), []
    for step in range(3):
        seen.append(await slots.acquire(step))
        await slots.release(seen[-1])
    assert len(set(seen)) == 3


async def test_a_new_step_takes_back_what_the_steps_before_still_held() -> None:
    slots = SlotPool(2, 64)
    await slots.acquire(0)
    await slots.acquire(0)
    await slots.acquire(1)
    assert slots.held == 1


async def test_a_late_writer_of_a_step_that_is_over_gets_no_handle() -> None:
    slots = SlotPool(1, 64)
    late = await slots.acquire(0)
    assert await slots.write(late, EMPTY) is not None
    now = await slots.acquire(1)
    assert await slots.write(late, EMPTY) is None
    assert await slots.write(now, EMPTY) is not None


async def test_a_released_ticket_writes_nothing() -> None:
    slots = SlotPool(1, 64)
    ticket = await slots.acquire(0)
    await slots.release(ticket)
    assert await slots.write(ticket, EMPTY) is None


async def test_releasing_an_old_ticket_frees_nothing_of_the_step_under_way() -> None:
    slots = SlotPool(1, 64)
    old = await slots.acquire(0)
    await slots.acquire(1)
    await slots.release(old)
    assert slots.held == 1
    waiting = asyncio.create_task(slots.acquire(1))
    await turns()
    assert not waiting.done()
    waiting.cancel()


async def test_who_waits_for_an_old_step_leaves_when_a_new_one_begins() -> None:
    slots = SlotPool(1, 64)
    await slots.acquire(0)
    waiting = asyncio.create_task(slots.acquire(0))
    await turns()
    now = await slots.acquire(1)
    with pytest.raises(StepOver, match="step 1 is over"):
        await waiting
    with pytest.raises(StepOver):
        await slots.acquire(0)
    assert await slots.write(now, EMPTY) is not None


async def test_a_waiter_that_is_cancelled_holds_nothing() -> None:
    slots = SlotPool(1, 64)
    first = await slots.acquire(0)
    waiting = asyncio.create_task(slots.acquire(0))
    await turns()
    waiting.cancel()
    await turns()
    await slots.release(first)
    await slots.acquire(0)


async def test_what_is_forgotten_is_free_for_any_step_again() -> None:
    slots = SlotPool(2, 64)
    late = await slots.acquire(7)
    await slots.acquire(7)
    await slots.forget()
    assert slots.held == 0
    assert await slots.write(late, EMPTY) is None
    assert await slots.write(await slots.acquire(3), EMPTY) is not None


async def test_who_waited_when_all_was_forgotten_gets_no_buffer() -> None:
    slots = SlotPool(1, 64)
    await slots.acquire(7)
    waiting = asyncio.create_task(slots.acquire(7))
    await turns()
    await slots.forget()
    with pytest.raises(StepOver):
        await waiting
    assert slots.held == 0


def rows(*values: float) -> dict[str, torch.Tensor]:
    return {"states": torch.tensor(values)}


async def ten_turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_parts_of_a_microbatch_come_out_in_the_order_of_their_teachers() -> None:
    output_buffer = TeacherOutputBuffer({0: [0, 1, 2]})
    taking = asyncio.create_task(asyncio.to_thread(output_buffer.take, 0))
    for part in (2, 0, 1):
        await ten_turns()
        assert not taking.done()
        output_buffer.deliver(0, part, rows(10.0 * part, 10.0 * part + 1))
    assert (await taking)["states"].tolist() == [0, 1, 10, 11, 20, 21]


async def test_what_came_before_the_thread_asked_is_there() -> None:
    output_buffer = TeacherOutputBuffer({3: [0], 5: [1]})
    output_buffer.deliver(5, 1, rows(5))
    output_buffer.deliver(3, 0, rows(3))
    assert (await asyncio.to_thread(output_buffer.take, 3))["states"].tolist() == [3]
    assert (await asyncio.to_thread(output_buffer.take, 5))["states"].tolist() == [5]


async def test_a_part_that_comes_twice_counts_once() -> None:
    output_buffer = TeacherOutputBuffer({0: [0]})
    output_buffer.deliver(0, 0, rows(1))
    output_buffer.deliver(0, 0, rows(2))
    assert (await asyncio.to_thread(output_buffer.take, 0))["states"].tolist() == [1]


async def test_there_is_room_for_so_many_microbatches_ahead_of_the_thread() -> None:
    order = [4, 1, 7, 2]
    output_buffer = TeacherOutputBuffer({micro: [0] for micro in order})
    for micro in order[:AHEAD]:
        await output_buffer.wait_for_capacity(micro)
    waiting = [
        asyncio.create_task(output_buffer.wait_for_capacity(micro)) for micro in order[AHEAD:]
    ]
    for place, micro in enumerate(order[: len(waiting)]):
        await ten_turns()
        assert [task.done() for task in waiting] == [n < place for n in range(len(waiting))]
        output_buffer.deliver(micro, 0, rows(0))
        await asyncio.to_thread(output_buffer.take, micro)
        await waiting[place]


async def test_a_choice_reaches_everybody_who_asks_for_it() -> None:
    output_buffer = TeacherOutputBuffer({0: [0, 1]})
    asking = [asyncio.create_task(output_buffer.choice(0)) for _ in range(2)]
    await ten_turns()
    assert not any(task.done() for task in asking)
    ids = torch.tensor([[1, 2]])
    await asyncio.to_thread(output_buffer.offer_choice, 0, ids)
    assert all(torch.equal(found, ids) for found in await asyncio.gather(*asking))
    assert torch.equal(await output_buffer.choice(0), ids)


async def test_one_who_stops_asking_takes_the_choice_from_nobody() -> None:
    output_buffer = TeacherOutputBuffer({0: [0, 1]})
    one, other = (asyncio.create_task(output_buffer.choice(0)) for _ in range(2))
    await ten_turns()
    one.cancel()
    await ten_turns()
    await asyncio.to_thread(output_buffer.offer_choice, 0, torch.tensor([[3]]))
    assert (await other).tolist() == [[3]]


async def test_losing_the_signals_wakes_everybody() -> None:
    output_buffer = TeacherOutputBuffer({0: [0], 1: [0], 2: [0]})
    taking = asyncio.create_task(asyncio.to_thread(output_buffer.take, 0))
    waiting = [
        asyncio.create_task(output_buffer.wait_for_capacity(2)),
        asyncio.create_task(output_buffer.choice(1)),
    ]
    await ten_turns()
    await output_buffer.lose("the teacher is gone")
    for task in (taking, *waiting):
        with pytest.raises(
            TeacherOutputsLost, match="without its SDPO signals: the teacher is gone"
        ):
            await task
    for late in (
        output_buffer.wait_for_capacity(0),
        output_buffer.choice(0),
        asyncio.to_thread(output_buffer.take, 1),
    ):
        with pytest.raises(TeacherOutputsLost):
            await late


async def test_what_was_delivered_before_the_loss_can_still_be_taken() -> None:
    output_buffer = TeacherOutputBuffer({0: [0], 1: [0]})
    output_buffer.deliver(0, 0, rows(1))
    await output_buffer.lose("gone")
    output_buffer.deliver(1, 0, rows(2))  # too late, and no error
    assert (await asyncio.to_thread(output_buffer.take, 0))["states"].tolist() == [1]
    with pytest.raises(TeacherOutputsLost):
        await asyncio.to_thread(output_buffer.take, 1)
    await asyncio.to_thread(output_buffer.offer_choice, 1, torch.tensor([[1]]))
    await ten_turns()


async def test_a_trainer_reports_that_it_waits_for_its_teachers_until_all_parts_came() -> None:
    output_buffer = TeacherOutputBuffer({2: [0, 1]})
    output_buffer.deliver(2, 0, rows(1))
    taking = asyncio.create_task(asyncio.to_thread(output_buffer.take, 2))
    await until(lambda: PROGRESS.report()["waits_for"] == "the SDPO teachers")
    before = PROGRESS.count
    output_buffer.deliver(2, 1, rows(2))
    assert (await taking)["states"].tolist() == [1, 2]
    assert PROGRESS.count > before
    assert not PROGRESS.report()["waits_for"]

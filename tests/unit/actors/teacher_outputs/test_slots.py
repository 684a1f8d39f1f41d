"""Buffers that signals leave by: back-pressure, tickets, and what a new step takes back."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import torch

from composer_mesh.actors.teacher_outputs.messages import SlotPool, StepOver

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
    await asyncio.wait_for(slots.acquire(1), 1)
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
    await asyncio.wait_for(slots.acquire(0), 1)


def test_the_end_of_a_step_crosses_a_process() -> None:
    assert str(pickle.loads(pickle.dumps(StepOver(3)))) == str(StepOver(3))


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

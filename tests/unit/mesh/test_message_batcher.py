"""Batches of items: the first goes at once, those that follow together, none is too large."""

from __future__ import annotations

import asyncio

import pytest
from fake_host import turns

from composer_mesh.mesh.call_server import (
    FEW,
    LONGEST_WAIT_S,
    MESSAGE_BYTES,
    SHARE,
    Item,
    MessageBatcher,
    messages_of,
    tick_of,
    until_next,
)


def item(number: int, size: int = 1) -> Item:
    return (number, "call", b"x" * size)


def numbers(messages: list[list[Item]]) -> list[list[int]]:
    return [[number for number, *_ in message] for message in messages]


async def test_items_of_one_turn_of_the_loop_share_a_message_which_goes_at_once() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append)
    batcher.add(item(0))
    batcher.add(item(1))
    await turns()
    assert numbers(sent) == [[0, 1]]


async def test_items_that_follow_a_message_wait_for_the_pause_and_share_the_next() -> None:
    sent: asyncio.Queue[list[Item]] = asyncio.Queue()
    batcher = MessageBatcher(sent.put_nowait)
    batcher.add(item(0))
    assert numbers([await sent.get()]) == [[0]]
    batcher.add(item(1))
    await asyncio.sleep(0)
    batcher.add(item(2))
    assert numbers([await sent.get()]) == [[1, 2]]


def test_items_that_wait_for_a_tick_are_sent_with_all_others_before_it() -> None:
    ends = {now + until_next(now, 0.0, 0.25) for now in (10.01, 10.1, 10.2499)}
    assert ends == {10.25}
    assert until_next(10.01, earliest=10.02, tick_s=0.0) == pytest.approx(0.01)


async def test_an_item_goes_at_once_again_when_few_calls_are_left() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append)
    batcher.took(3600.0, unanswered=FEW + 1)
    batcher.took(3600.0, unanswered=FEW)
    batcher.add(item(0))
    await turns()
    assert numbers(sent) == [[0]]


@pytest.mark.parametrize("call_s", [0.001, 0.3, 0.5, 1.7, 17.0, 3600.0])
@pytest.mark.parametrize("longest_s", [0.002, 0.03, LONGEST_WAIT_S])
def test_a_tick_is_a_small_share_of_a_call_and_coincides_with_every_shorter_one(
    call_s: float, longest_s: float
) -> None:
    tick = tick_of(call_s, FEW + 1, longest_s)
    assert tick <= min(SHARE * call_s, longest_s)
    assert not tick or LONGEST_WAIT_S % tick == 0
    assert tick_of(call_s, FEW, longest_s) == 0


async def test_a_closed_batcher_sends_nothing() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append)
    batcher.add(item(0))
    batcher.close()
    await turns()
    assert sent == []


def test_a_message_is_no_larger_than_its_bound_unless_one_item_is() -> None:
    half, large = MESSAGE_BYTES // 2, 3 * MESSAGE_BYTES
    items = [item(0, half), item(1, half), item(2), item(3, large), item(4), item(5, 0)]
    assert numbers(messages_of(items)) == [[0, 1], [2], [3], [4, 5]]

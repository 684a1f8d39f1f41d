"""Batches of items: the first goes at once, those that follow together, none is too large."""

from __future__ import annotations

import asyncio

from fake_host import turns

from composer_mesh.mesh.message_batcher import MESSAGE_BYTES, Item, MessageBatcher, messages_of


def item(number: int, size: int = 1) -> Item:
    return (number, "call", b"x" * size)


def numbers(messages: list[list[Item]]) -> list[list[int]]:
    return [[number for number, *_ in message] for message in messages]


async def test_items_of_one_turn_of_the_loop_share_a_message_which_goes_at_once() -> None:
    sent: list[list[Item]] = []
    batcher = MessageBatcher(sent.append, pause_s=3600.0)
    batcher.add(item(0))
    batcher.add(item(1))
    await turns()
    assert numbers(sent) == [[0, 1]]


async def test_items_that_follow_a_message_wait_for_the_pause_and_share_the_next() -> None:
    sent: asyncio.Queue[list[Item]] = asyncio.Queue()
    batcher = MessageBatcher(sent.put_nowait, pause_s=0.05)
    batcher.add(item(0))
    assert numbers([await sent.get()]) == [[0]]
    batcher.add(item(1))
    await asyncio.sleep(0)
    batcher.add(item(2))
    assert numbers([await sent.get()]) == [[1, 2]]


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

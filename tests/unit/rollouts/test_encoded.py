"""Long messages are encoded in a thread, so that an event loop never stands still for them."""

from __future__ import annotations

import asyncio
import threading

from composer_mesh.rollouts.chat import LONG_TEXT, encoded


async def test_the_loop_goes_on_while_long_messages_are_encoded() -> None:
    going_on = threading.Event()

    def encode() -> list[int]:
        assert going_on.wait(60)  # set by the loop, which therefore goes on
        return [1, 2]

    asyncio.get_running_loop().call_soon(going_on.set)
    long = [{"role": "tool", "content": "x" * LONG_TEXT}, {"role": "assistant", "content": None}]
    assert await encoded(long, encode) == [1, 2]


async def test_short_messages_are_encoded_at_once() -> None:
    found = encoded([{"role": "tool", "content": "x"}], lambda: [threading.get_ident()])
    assert await found == [threading.get_ident()]

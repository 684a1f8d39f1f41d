"""A process that can no longer serve the calls of others says so: their callers would wait."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from monarch.actor import Channel

from composer_mesh.mesh.call_stream import CALL, StreamServer
from composer_mesh.mesh.message_batcher import Item

BOUND_S = 60.0


class Unanswerable(BaseException):
    """An error that is no answer, as of a call that ends in want of memory."""


async def test_a_call_that_cannot_be_answered_is_reported_as_a_failure_of_the_process() -> None:
    failures: asyncio.Queue[BaseException] = asyncio.Queue()

    async def fails(*_: Any) -> None:
        raise Unanswerable

    answers, _receiver = Channel[list[Item]].open()
    calls = StreamServer(lambda _: fails, failures.put_nowait).open("caller", answers)
    calls.send([(0, CALL, pickle.dumps(("say", ())))])
    async with asyncio.timeout(BOUND_S):
        assert isinstance(await failures.get(), Unanswerable)

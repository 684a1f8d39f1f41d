"""Waiting for several things at once, so that whatever happens none of them is left behind.

Knows no actors and no Monarch.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines beside each other; returns their results in order.

    Waits until all have ended, also when one fails or the waiting is cancelled: then the others are
    cancelled, once, and may take themselves back in peace.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    done: set[asyncio.Future[Any]] = set()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_and_wait(tasks)
    for task in done:
        task.result()
    return [task.result() for task in tasks]


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until each of them has ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Waits for several tasks, so that none is left running whatever happens."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently; return their results in order.

    Waits until all have ended, also when one fails or the wait is cancelled: then the others are
    cancelled, once, and may clean up undisturbed.
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

"""Request coalescing: concurrent equal queries share one request."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from composer_mesh.configs.worded import Worded

T = TypeVar("T")


class ClientClosed(Worded, Exception):
    """The client was closed before a query had its answer."""

    message = "whoever asks is closed: open another and ask again"


class RequestCoalescer(Generic[T]):
    """Coalesces the requests of one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}

    async def get(self, key: str, request: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """Return the answer, and whether it came from an equal query already in flight.

        A request continues if its callers are cancelled. Raises ClientClosed once this is closed.
        """
        task, shared = self._tasks.get(key), True
        if task is None:
            task, shared = asyncio.create_task(request()), False
            self._tasks[key] = task
            task.add_done_callback(lambda _: self._tasks.pop(key, None))
        try:
            return await asyncio.shield(task), shared
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise ClientClosed from None
            raise

    async def aclose(self) -> None:
        """Cancel running requests. Waits until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

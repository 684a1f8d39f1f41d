"""Calls that arrive at a process in messages: each runs in its own task and is answered once.

`call_stream` has the calls between actors, `pipe_calls` those between an actor and a process that
it has started. Imports nothing of Monarch.
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from composer_mesh.mesh.message_batcher import LONGEST_WAIT_S, Item, MessageBatcher
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.tasks.call_marks import current_call
from composer_mesh.tasks.calls import is_requested

CALL, CANCEL, RESULT, ERROR, LOAD = "call", "cancel", "result", "error", "load"

current_caller: ContextVar[str] = ContextVar("current_caller", default="")
"""Within an endpoint that was called by a message: the caller's name."""

Endpoint = Callable[..., Awaitable[Any]]


class CallServer:
    """Runs the calls of several callers; `endpoint` returns the coroutine function of a name.

    Whatever an endpoint raises is answered, so that nobody waits for a call that has ended.
    `failed` is called where calls can no longer be read or answered, for want of memory: their
    callers would wait forever.
    """

    def __init__(
        self, endpoint: Callable[[str], Endpoint], failed: Callable[[BaseException], None]
    ) -> None:
        self._endpoint, self._failed = endpoint, failed
        self._running: dict[str, dict[int, asyncio.Task[None]]] = {}
        self._answers: dict[str, MessageBatcher] = {}

    def answer_to(
        self,
        caller: str,
        send: Callable[[list[Item]], None],
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        """Answer a caller's calls in messages to `send`."""
        self._running[caller] = {}
        answer = partial(self._answer, caller, send)
        self._answers[caller] = MessageBatcher(answer, longest_wait_s)

    def take(self, caller: str, items: list[Item]) -> None:
        """Start the calls of one message and cancel what it says."""
        running = self._running[caller]
        for number, kind, contents in items:
            if kind == CALL:
                task = asyncio.create_task(self._run(caller, number, contents))
                running[number] = task
                task.add_done_callback(partial(self._call_ended, running, number))
            elif number in running:
                running[number].cancel()

    @property
    def running(self) -> int:
        """Number of calls that are not answered yet."""
        return sum(map(len, self._running.values()))

    async def hang_up(self, caller: str) -> None:
        """Cancel the calls of a caller that is dead. Waits until they have ended."""
        await cancel_and_wait(list(self._running.pop(caller, {}).values()))
        if (answers := self._answers.pop(caller, None)) is not None:
            answers.close()

    def _call_ended(
        self, running: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]
    ) -> None:
        """Forget a call; one that is cancelled before its first step runs no code itself."""
        running.pop(number, None)
        self._ended(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _answer(self, caller: str, send: Callable[[list[Item]], None], items: list[Item]) -> None:
        others = self.running - len(self._running.get(caller, {}))
        send([(others, LOAD, b""), *items])

    async def _run(self, caller: str, number: int, contents: bytes) -> None:
        current_caller.set(caller)
        current_call.set(number)
        now = asyncio.get_running_loop().time
        began = now()
        try:
            endpoint, args = pickle.loads(contents)
            found = pickle.dumps(await self._endpoint(endpoint)(*args))
            kind = RESULT
        except BaseException as error:
            if is_requested(error):
                raise
            found, kind = _packed(error), ERROR
        running = self._running.get(caller, {})
        running.pop(number, None)
        if (answers := self._answers.get(caller)) is not None:
            answers.took(now() - began, len(running))
            answers.add((number, kind, found))


def _packed(error: BaseException) -> bytes:
    """Pickle an error with its traceback; only the traceback where the error cannot travel.

    One that is no `Exception` would end its caller as if it had been cancelled or interrupted.
    """
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return pickle.dumps((None, text))
    try:
        packed = pickle.dumps((error, text))
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  whatever a foreign exception raises when it is pickled
        return pickle.dumps((None, text))
    return packed

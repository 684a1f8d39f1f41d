"""Runs an engine in its own thread, stepped while there is work, with weight swaps between steps.

    ask, swap (event loop) --> EngineLoop --> step, swap (the engine's thread) --> answers

Adds only asynchronous waiting to an engine.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from composer_mesh.actors.engines.port import Engine, Weights
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Answer = asyncio.Future[GenerationResult]
P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """The single thread that creates, steps, swaps and closes an engine.

    Engines depend on the thread: thread pools on a CPU, the current device on a GPU.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work in the thread. Waits for it, and for the work queued before it."""
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class EngineLoop:
    """Makes a stepped engine awaitable. `serve` must be running."""

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine, self._thread = engine, thread
        self._wake = asyncio.Event()
        self._finished: list[tuple[Answer, GenerationResult]] = []
        self._staged: tuple[Weights, asyncio.Future[None]] | None = None
        self._closing = False
        self.tokens = 0

    @property
    def outstanding(self) -> int:
        """Number of unanswered requests."""
        return self._engine.outstanding

    def ask(self, request: GenerationRequest) -> Answer:
        """Queue a request without waiting; raises ValueError for one that can never be served."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._engine.submit(request, lambda result: self._finished.append((answer, result)))
        self._wake.set()
        return answer

    async def swap(self, weights: Weights) -> None:
        """Serve other weights. Waits for the running step; one call at a time."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._staged = (weights, done)
        self._wake.set()
        await done

    async def serve(self) -> None:
        """Step while there is work, forever; raises the error that ends the engine.

        The caller must then fail the pending answers.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._engine.busy or self._staged is not None:
                await self._turn()

    async def close(self) -> None:
        """Close the engine, after `serve` was cancelled. Waits for the running step."""
        self._closing = True
        await self._thread.run(self._engine.close)

    async def _turn(self) -> None:
        """Swap in new weights, or decode until there are some or nothing is left to do."""
        if self._staged is None:
            await self._thread.run(self._decode, asyncio.get_running_loop())
            return
        (weights, done), self._staged = self._staged, None
        await self._thread.run(self._engine.swap, weights)
        if not done.done():
            done.set_result(None)

    def _decode(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step while there is work and no swap is waiting; deliver answers after each step.

        Whether work is left is checked before answers are delivered, because they may bring more:
        the next closed batch must not be admitted while only a part of it has arrived.
        """
        busy = True
        while busy and self._staged is None and not self._closing:
            self.tokens += self._engine.step()
            busy = self._engine.busy
            finished, self._finished = self._finished, []
            if finished:
                loop.call_soon_threadsafe(_resolve, finished)


def _resolve(finished: list[tuple[Answer, GenerationResult]]) -> None:
    for answer, result in finished:
        if not answer.done():
            answer.set_result(result)

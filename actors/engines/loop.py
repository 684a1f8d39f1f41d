"""Runs an engine in its own thread, stepped while there is work, with weight swaps between steps.

    ask, swap (event loop) --> EngineLoop --> step, swap (the engine's thread) --> answers

Adds only asynchronous waiting to an engine.

The requests of an engine that are neither answered nor aborted, by id.

An engine's thread answers them while other threads submit and abort: each ends exactly once.

Closed batches whose requests come in shares, one from each caller.

A batch is given to the engine when all of its requests are there, sorted by name: which caller sent
which of them, and in which order they came, changes nothing in what the engine computes.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

from composer_mesh.actors.engines.port import (
    DecodingDeadlineExceeded,
    DuplicateRequest,
    GenerationEngine,
    RequestAborted,
    VersionedWeights,
)
from composer_mesh.mesh.progress import made_progress
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

T = TypeVar("T")


class OpenRequests(Generic[T]):
    """Entries by request id. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: str, entry: T) -> None:
        """Enter a request; raises `DuplicateRequest` if its id is open."""
        with self._lock:
            if request_id in self._entries:
                raise DuplicateRequest(request_id)
            self._entries[request_id] = entry

    def abort(self, request_id: str) -> T | None:
        """Remove and return a request; None if it is not open."""
        with self._lock:
            return self._entries.pop(request_id, None)

    def answer(self, request_id: str, entry: T) -> bool:
        """Remove a request; False if it was aborted, also if its id is open again."""
        with self._lock:
            if self._entries.get(request_id) is not entry:
                return False
            del self._entries[request_id]
            return True


@dataclass
class _Round(Generic[T]):
    """One batch that is not complete; `started` is done when its requests were given away."""

    continues: bool
    started: asyncio.Future[dict[str, T]]
    requests: list[GenerationRequest] = field(default_factory=list)


class BatchRounds(Generic[T]):
    """The closed batches of one engine; `ask` gives it one and returns what is awaited.

    Its second argument says whether the batch continues the one before it, whose prefixes are
    then reused.
    """

    def __init__(self, ask: Callable[[list[GenerationRequest], bool], list[T]]) -> None:
        self._ask = ask
        self._open: dict[int, _Round[T]] = {}
        self._closed = -1

    async def share(
        self, number: int, size: int, requests: list[GenerationRequest], continues: bool
    ) -> list[T]:
        """Return what `ask` returned for the requests of one share, in order.

        Waits until the round has `size` requests. A share of a closed round is sent at once.
        """
        if number <= self._closed:
            return self._ask(requests, True)
        started = asyncio.get_running_loop().create_future
        turn = self._open.setdefault(number, _Round(continues, started()))
        turn.requests += requests
        if len(turn.requests) >= size:
            self._start(number)
        awaited = await asyncio.shield(turn.started)
        return [awaited[request.request_id] for request in requests]

    def close(self, number: int) -> None:
        """Ask what has arrived of a round, and of every round before it."""
        self._closed = max(self._closed, number)
        for one in [one for one in self._open if one <= number]:
            self._start(one)

    def _start(self, number: int) -> None:
        turn = self._open.pop(number)
        ordered = sorted(turn.requests, key=lambda request: request.request_id)
        try:
            awaited = self._ask(ordered, turn.continues)
        except Exception as error:  # noqa: BLE001  each share's caller must get it
            turn.started.set_exception(error)
            return
        names = [request.request_id for request in ordered]
        turn.started.set_result(dict(zip(names, awaited, strict=True)))


Answer = asyncio.Future[GenerationResult]
P = ParamSpec("P")


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

    def end(self) -> None:
        """End the thread once its work is done, without waiting; it takes no more."""
        self._pool.shutdown(wait=False)


@dataclass(frozen=True)
class _Change:
    """What is done with an engine between two steps, and whether it then sleeps."""

    work: Callable[[], None]
    what: str
    asleep: bool
    done: asyncio.Future[None]


class EngineLoop:
    """Makes a stepped engine awaitable. `serve` must be running.

    Every answer ends exactly once. One that is cancelled aborts its request; one whose request is
    aborted for another reason raises `RequestAborted`, or `LogitsNotFinite`.
    """

    def __init__(self, engine: GenerationEngine, thread: EngineThread) -> None:
        self.engine, self._thread = engine, thread
        self._wake = asyncio.Event()
        self._answers: dict[str, Answer] = {}
        self._finished: list[tuple[Answer, GenerationResult | RequestAborted]] = []
        self._staged: _Change | None = None
        self.asleep = False
        """Whether the engine has no memory on its device: requests wait."""
        self._closing = False
        self._progress = 0
        """Number of steps and swaps so far."""
        self.tokens = 0
        self.aborted = 0
        """Number of requests that were aborted, for whatever reason."""

    @property
    def outstanding(self) -> int:
        """Number of unanswered requests."""
        return self.engine.outstanding

    def ask(self, request: GenerationRequest) -> Answer:
        """Queue a request without waiting; raises ValueError for one that can never be served.

        An unanswered request with the same id is aborted: its caller has given it up, or must not
        get what another one waits for.
        """
        self.abort(request.request_id, "a request with the same id was submitted")
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        admitted = None
        if request.deadline_s is not None:
            start = functools.partial(self._start_deadline, request, answer)
            admitted = functools.partial(loop.call_soon_threadsafe, start)
        self.engine.submit(
            request, lambda result: self._finished.append((answer, result)), admitted
        )
        self._answers[request.request_id] = answer
        answer.add_done_callback(functools.partial(self._ended, request.request_id))
        self._wake.set()
        return answer

    def ask_together(
        self, requests: Sequence[GenerationRequest], *, continues: bool = False
    ) -> list[Answer]:
        """Queue requests before the next step; on an idle engine they are a closed batch.

        The prefixes that the engine keeps are dropped first, unless the batch `continues` the one
        before.
        """
        if not continues:
            self.engine.drop_prefixes()
        answers: list[Answer] = []
        try:
            answers.extend(map(self.ask, requests))
        except ValueError:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    def abort(self, request_id: str, why: str) -> bool:
        """Abort a request, whose answer raises `RequestAborted`; False if its id is not open."""
        return self._abort(RequestAborted(request_id, why))

    def _abort(self, error: RequestAborted) -> bool:
        request_id: str = error.args[0]
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return False
        self.aborted += 1
        self.engine.abort(request_id)
        if not answer.done():
            answer.set_exception(error)
        return True

    def _ended(self, request_id: str, answer: Answer) -> None:
        """Abort the request of an answer that was cancelled."""
        if answer.cancelled() and self._answers.get(request_id) is answer:
            self.abort(request_id, "its caller gave it up")

    def _start_deadline(self, request: GenerationRequest, answer: Answer) -> None:
        """Start the clock of an admitted request, or start it again."""
        if request.deadline_s is not None and not answer.done():
            loop = asyncio.get_running_loop()
            expire = functools.partial(self._expire, request, answer, self._progress)
            timer = loop.call_later(request.deadline_s, expire)
            answer.add_done_callback(lambda _: timer.cancel())

    def _expire(self, request: GenerationRequest, answer: Answer, progress: int) -> None:
        """Abort a request if the engine has done nothing since its clock was started."""
        if self.asleep or self._progress != progress:
            self._start_deadline(request, answer)
        elif request.deadline_s is not None and not answer.done():
            self._abort(DecodingDeadlineExceeded(request.request_id, request.deadline_s))

    def _resolve(self, finished: list[tuple[Answer, GenerationResult | RequestAborted]]) -> None:
        for answer, result in finished:
            if answer.done():
                continue
            if isinstance(result, RequestAborted):
                self._abort(result)
            else:
                del self._answers[result.request_id]
                answer.set_result(result)

    async def swap(self, weights: VersionedWeights) -> None:
        """Serve other weights. Waits for the running step.

        One call of this, `sleep` and `wake` at a time.
        """
        swap = functools.partial(self.engine.swap, weights)
        await self._between_steps(swap, "new weights to decode with", asleep=False)

    async def sleep(self, replaced: Collection[str] = ()) -> None:
        """Free the engine's device memory, as its `sleep` does. Waits for the running step."""
        sleep = functools.partial(self.engine.sleep, replaced)
        await self._between_steps(sleep, "an engine that sleeps", asleep=True)

    async def wake(self, weights: VersionedWeights | None = None) -> None:
        """Serve again after `sleep`, with these weights if given."""
        wake = functools.partial(self.engine.wake, weights)
        await self._between_steps(wake, "an engine that is awake", asleep=False)

    async def _between_steps(self, work: Callable[[], None], what: str, *, asleep: bool) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._staged = _Change(work, what, asleep, done)
        self._wake.set()
        await done

    async def serve(self) -> None:
        """Step while there is work, forever; raises the error that ends the engine.

        The caller must then fail the pending answers.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (self.engine.busy and not self.asleep) or self._staged is not None:
                await self._turn()

    async def close(self) -> None:
        """Close the engine, after `serve` was cancelled. Waits for the running step."""
        self._closing = True
        await self._thread.run(self.engine.close)

    async def _turn(self) -> None:
        """Do what is to be done between steps, or decode until there is some or nothing is left."""
        if self._staged is None:
            await self._thread.run(self._decode, asyncio.get_running_loop())
            return
        change, self._staged = self._staged, None
        await self._thread.run(change.work)
        self.asleep = change.asleep
        self._progress += 1
        made_progress(change.what)
        if not change.done.done():
            change.done.set_result(None)

    def _decode(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step while there is work and no swap is waiting; deliver answers after each step.

        Whether work is left is checked before answers are delivered, because they may bring more:
        the next closed batch must not be admitted while only a part of it has arrived.
        """
        busy = True
        while busy and self._staged is None and not self._closing:
            self.tokens += self.engine.step()
            self._progress += 1
            made_progress("a decoding step")
            busy = self.engine.busy
            finished, self._finished = self._finished, []
            if finished:
                loop.call_soon_threadsafe(self._resolve, finished)

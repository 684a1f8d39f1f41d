"""Writer thread of a store: runs jobs in order, so that the event loop never waits for a disk.

    tell(job)          queued without waiting; its error is raised by later `call`s or by `close`
    await call(job)    queued; waits for the job and returns its result or raises its error

A queued job is executed even if its caller is cancelled.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Job = Callable[[], Any]
Settle = Callable[[Any, BaseException | None], None]
ErrorsNamed = Callable[[], AbstractContextManager[None]]


class WriterThread:
    """Executes jobs in order; `idle` is called in the thread when the queue is empty.

    Each job runs in a context of `errors`, which may name what it raises.
    """

    def __init__(self, idle: Job, errors: ErrorsNamed = nullcontext) -> None:
        self._idle, self._errors = idle, errors
        self._jobs: SimpleQueue[tuple[Job, Settle] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        self._seen = False
        self._waits: list[float] = []
        self._longest = 0
        self._thread = threading.Thread(target=self._work, name="run-store", daemon=True)
        self._thread.start()

    def tell(self, job: Job) -> None:
        """Queue a job after the earlier ones, without waiting."""
        self._put(job, self._keep_failure)

    async def call(self, job: Callable[[], T]) -> T:
        """Queue a job after the earlier ones and wait for its result, without blocking the loop."""
        self.raise_failure()
        began, loop = time.perf_counter(), asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(self._settle, done, result, error)
            except RuntimeError:  # the loop ended before the job
                self._keep_failure(None, error)

        self._put(job, settle)
        try:
            return await done
        finally:
            self._waits.append(time.perf_counter() - began)

    def close(self) -> None:
        """Wait for all jobs, then raise the first error that was not raised before."""
        self._jobs.put(None)
        self._thread.join()
        if not self._seen:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a failed job that no caller waited for."""
        if self._failure is not None:
            self._seen = True
            raise self._failure

    def waits(self) -> tuple[list[float], int]:
        """Return sorted wait times of calls in seconds and the longest queue since last time."""
        waits, self._waits = sorted(self._waits), []
        longest, self._longest = self._longest, 0
        return waits, longest

    def _put(self, job: Job, settle: Settle) -> None:
        self._jobs.put((job, settle))
        self._longest = max(self._longest, self._jobs.qsize())

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            self._do(*task)
            if self._jobs.empty():
                self._do(self._idle, self._keep_failure)
        self._do(self._idle, self._keep_failure)

    def _do(self, job: Job, settle: Settle) -> None:
        try:
            with self._errors():
                result = job()
        except BaseException as error:  # noqa: BLE001  the waiting caller gets it
            settle(None, error)
        else:
            settle(result, None)

    def _keep_failure(self, _: Any, error: BaseException | None) -> None:
        self._failure = self._failure or error

    def _settle(
        self, done: "asyncio.Future[Any]", result: Any, error: BaseException | None
    ) -> None:
        if done.cancelled():
            self._keep_failure(None, error)
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

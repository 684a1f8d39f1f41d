"""Writer thread of a store: runs jobs in order, so that the event loop never waits for a disk.

    tell(job)          queued without waiting; its error is raised by later `call`s or by `close`
    await call(job)    queued; waits for the job and returns its result or raises its error

A queued job is executed even if its caller is cancelled.

JSON-lines files of a run directory, for people, tools and followers of a live run.

Files with rows in `run.sqlite` are copies that can be rebuilt; events are stored here only.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.services.directory.file_checksums import FileChecksums


class AppendedLines:
    """Append-only files of a folder, through no links below it. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root, self._folder = root, OpenFolder(root)
        self._files: dict[str, FileIO] = {}
        self._dirty: set[str] = set()
        self.checksums = FileChecksums(root)
        """Those of the files that are no copies of rows."""

    def add(self, name: str, line: bytes, *, copy: bool = False) -> None:
        """Append a line. Readers see it at once; `sync` puts it on disk.

        Lines that are no copies of rows get a checksum.
        """
        if name not in self._files:
            # Unbuffered, so that nothing is left to fail once more when the file is closed.
            self._files[name] = self._folder.append(name)
        left = memoryview(line + b"\n")
        while left:
            left = left[self._files[name].write(left) :]
        if not copy:
            self.checksums.appended(name, line + b"\n")
        self._dirty.add(name)

    def sync(self) -> None:
        """Flush all files to disk."""
        while self._dirty:
            os.fsync(self._files[self._dirty.pop()].fileno())

    def be(self, name: str, lines: Iterable[bytes]) -> None:
        """Rewrite a file atomically if its content differs from these lines."""
        content, path = b"".join(line + b"\n" for line in lines), self._root / name
        if (path.read_bytes() if path.exists() else b"") == content:
            return
        if name in self._files:
            self._files.pop(name).close()
            self._dirty.discard(name)
        self._folder.write_whole(name, content)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._folder.close()


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

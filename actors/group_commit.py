"""Runs transactions on a SQLite file in a thread, many in one commit.

A commit waits for the disk, and what is requested meanwhile is in the next one. A job's result, or
its error, reaches its caller after the commit that it is part of.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from composer_mesh.actors.sqlite_file import SqliteFile

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], Any]
Waiting = tuple[Job, "asyncio.Future[Any]"]
MOST = 256
"""Jobs of one commit."""


class GroupCommit:
    """Jobs on a file's connection; each is undone alone where it raises."""

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Waiting | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="group-commit", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job after the earlier ones. Waits until it is on disk; it runs if cancelled too."""
        return await asyncio.shield(self.start(job))

    async def repeat(self, job: Callable[[sqlite3.Connection], int]) -> None:
        """Run a job until it returns 0, each time in a transaction of its own, among others."""
        while await self.run(job):
            pass

    def start(self, job: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Queue a job behind those that were queued before; its result comes when it is on disk."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """Wait for all jobs; takes no more."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._jobs.get()) is not None:
            together, ends = [first], False
            while len(together) < MOST and not self._jobs.empty():
                following = self._jobs.get()
                if following is None:
                    ends = True
                    break
                together.append(following)
            self._tell(self._commit(together))
            if ends:
                return

    def _commit(self, jobs: list[Waiting]) -> list[tuple[Waiting, Any, BaseException | None]]:
        try:
            with self._file.transaction() as rows:
                return [(one, *_tried(rows, one[0])) for one in jobs]
        except Exception as error:  # noqa: BLE001  the waiting callers get it
            return [(one, None, error) for one in jobs]

    def _tell(self, outcomes: list[tuple[Waiting, Any, BaseException | None]]) -> None:
        def settle() -> None:
            for (_, done), result, error in outcomes:
                if done.done():
                    continue
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)


def _tried(rows: sqlite3.Connection, job: Job) -> tuple[Any, BaseException | None]:
    rows.execute("SAVEPOINT job")
    try:
        result = job(rows)
    except Exception as error:  # noqa: BLE001  the waiting caller gets it
        rows.execute("ROLLBACK TO job")
        rows.execute("RELEASE job")
        return None, error
    rows.execute("RELEASE job")
    return result, None

"""Teachers queried from a script or a notebook, by processes that share a budget in dollars.

    with TeacherPool(teachers, n=4, max_total_usd=2.0) as pool:
        replies = pool.query_sync([{"role": "user", "content": "What is 2 plus 3?"}])

A pool is `service.spawn(TeacherReplayActor, n=4, load=(teacher_settings(teachers, ...),))` on an
event loop of its own, so that it serves callers with and without one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from composer_mesh.actors.panel.configured import CACHE_FILE, PanelSettings
from composer_mesh.actors.panel_actors import TeacherReplayActor
from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.supervision import Supervisor
from composer_mesh.mesh.waiting import LoopThread
from composer_mesh.rollouts.budget import BudgetReport, dollars
from composer_mesh.rollouts.pairs import FrozenState, StudentState, TeacherReply
from composer_mesh.rollouts.traces import Message
from composer_mesh.services import service
from composer_mesh.services.offline.api import (
    Teacher,
    Tools,
    frozen_state,
    kept_in,
    query_config,
)
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.offline.session import (
    UNSERVED,
    cached_in,
    priced_teachers,
    refuse_unpayable,
)
from composer_mesh.services.pool.replicas import RestartRules
from composer_mesh.services.replay.teacher_settings import panel_settings


def teacher_settings(
    teachers: Sequence[Teacher],
    max_total_usd: float = 0.0,
    *,
    folder: Path | str,
    n: int = 1,
    tools: Tools = (),
    overrides: Sequence[str] = (),
) -> PanelSettings:
    """Return what the `load` of `n` TeacherReplayActors takes; sends nothing.

    Args:
        teachers: as for `replay_trace`.
        max_total_usd: limit of what all processes together spend with this folder, in dollars.
        folder: where costs and paid answers are stored; the same folder is charged once.
        n: processes that share the teachers' concurrency and rate limits.
        tools: JSON schemas of the tools that teachers may call.
        overrides: further keys of `[replay]`, as `replay.timeout_s=60`.

    Raises ReplayRefused and ConfigError.
    """
    return _settings(query_config(teachers, overrides, max_total_usd), Path(folder), n, tools)


def _settings(config: Config, folder: Path, n: int, tools: Tools) -> PanelSettings:
    settings = panel_settings(config, UNSERVED, folder.absolute(), tools)
    return replace(cached_in(folder.absolute() / CACHE_FILE, config, settings), replicas=n)


class TeacherPool:
    """`n` processes that query teachers for a script or a notebook, within a budget in dollars.

    The first query starts them; `close`, or the end of a `with` or `async with` block, stops them,
    and so does the end of the program. Methods with `_sync` block, and work in notebooks too.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        max_total_usd: float = 0.0,
        *,
        n: int = 1,
        tools: Tools = (),
        folder: Path | str | None = None,
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Check the teachers; start nothing. Raises ReplayRefused and ConfigError.

        Arguments are those of `teacher_settings`. Without a `folder` the limit holds for this pool,
        and answers are cached until it is closed.
        """
        if n < 1:
            raise ReplayRefused(f"n is {n}, but a pool has one process or more: raise n")
        self._config = query_config(teachers, overrides, max_total_usd)
        self._n, self._tools, self._environ = n, tools, environ
        self._folder = None if folder is None else Path(folder)
        self._thread: LoopThread | None = None
        self._opened = AsyncExitStack()
        self._service: service.Service | None = None

    async def query(
        self, messages: Sequence[Message] | FrozenState | StudentState, n: int | None = None
    ) -> list[TeacherReply]:
        """Query `n` of the teachers, or all, about a conversation; return their replies.

        Waits until each has answered or failed, at most `replay.timeout_s` (30 s) after the
        processes have started. A failure is a TeacherFailure among the replies. Raises
        UnusableMessages, and ReplayRefused for errors that affect every query.
        """
        return await self._loop().run(self._query(messages, n))

    def query_sync(
        self, messages: Sequence[Message] | FrozenState | StudentState, n: int | None = None
    ) -> list[TeacherReply]:
        """`query`, blocking this thread."""
        return self._loop().run_blocking(self._query(messages, n))

    async def spent_usd(self) -> float:
        """Return the dollars spent so far, over all processes."""
        return await self._loop().run(self._spent())

    def spent_usd_sync(self) -> float:
        """`spent_usd`, blocking this thread."""
        return self._loop().run_blocking(self._spent())

    async def close(self) -> None:
        """Stop the processes; wait until they are gone. A later query starts new ones."""
        if self._thread is not None:
            await self._thread.run(self._stop())
            self._end_thread()

    def close_sync(self) -> None:
        """`close`, blocking this thread."""
        if self._thread is not None:
            self._thread.run_blocking(self._stop())
            self._end_thread()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_sync()

    def _loop(self) -> LoopThread:
        if self._thread is None:
            self._thread = LoopThread("teacher pool")
            self._starting = asyncio.Lock()  # of that loop
        return self._thread

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    async def _query(self, given: Any, n: int | None) -> list[TeacherReply]:
        count = len(self._config.replay.teachers)
        if n is not None and not 1 <= n <= count:
            raise ReplayRefused(f"n is {n}, but there are {count} teachers: query 1 to that many")
        if isinstance(given, StudentState):
            given = given.state
        state = given if isinstance(given, FrozenState) else frozen_state(given)
        replies: list[TeacherReply] = await (await self._started()).call(
            "query", state, n=n or count
        )
        return replies

    async def _spent(self) -> float:
        report: BudgetReport = await (await self._started()).call("report")
        return dollars(report.run.spent)

    async def _started(self) -> service.Service:
        async with self._starting:
            if self._service is None:
                async with AsyncExitStack() as opened:
                    pool = await self._start(opened)
                    self._service, self._opened = pool, opened.pop_all()
            return self._service

    async def _start(self, opened: AsyncExitStack) -> service.Service:
        config = self._config
        folder = opened.enter_context(kept_in(self._folder))
        settings = _settings(config, folder, self._n, self._tools)
        refuse_unpayable(
            await priced_teachers(config, environ=self._environ), config.replay.budget.usd
        )
        named = {one.key_variable or "" for one in config.replay.teachers} & self._environ.keys()
        keys = Keys({name: self._environ[name] for name in named})
        host = await opened.enter_async_context(MeshHost(Supervisor()))
        pool = await service.spawn(
            TeacherReplayActor,
            n=self._n,
            load=(settings, keys),
            host=host,
            restart=RestartRules.of(config.supervision, config.run.seed),
            deadline_s=service.DEADLINE_S + config.replay.timeout_s,
        )
        return await opened.enter_async_context(pool)

    async def _stop(self) -> None:
        async with self._starting:
            self._service = None
            await self._opened.aclose()

"""Teachers of an offline replay: the server of the builtin ones, the panel, and its client.

The panel is the same as in a run, in this process and without a mesh.

The client bounds concurrency. The panel waits for suspended teachers, and for budget where reserved
money may be freed.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import httpx

from composer_mesh.actors.experts.http import (
    TOKEN_ENV,
    Expert,
    ExpertPanel,
    ExpertServer,
    new_token,
)
from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.panel import TeacherPanel, with_prices
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import ProviderError
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    TeacherFailure,
    TeacherReply,
)
from composer_mesh.services.offline.options import ReplayRefused
from composer_mesh.services.replay.teacher_settings import panel_settings
from composer_mesh.tasks.task import Task

UNSERVED = "http://127.0.0.1:9/v1"
"""Placeholder for the builtin teachers' address while they are not served."""

Environ = Mapping[str, str]


@asynccontextmanager
async def opened_panel(
    config: Config,
    task: Task | None,
    folder: Path,
    *,
    tools: Sequence[dict[str, Any]],
    answers: Path | None = None,
    environ: Environ = os.environ,
    transport: httpx.AsyncBaseTransport | None = None,
) -> AsyncIterator[TeacherPanel]:
    """Open the config's teachers; their ledger is in `folder`.

    Answers are cached in the config's file, else in `answers`, else in the default file of runs.
    `task` provides the builtin teachers' answers; it may be None without such teachers. Waits for
    model lists if prices are read from them. Raises `ReplayRefused` for errors that affect every
    query: no key, no price, a file that is or becomes unusable.
    """
    with served_experts(config, task, environ) as (url, environ):
        settings = patient(cached_in(answers, config, panel_settings(config, url, folder, tools)))
        try:
            panel = await TeacherPanel.open(settings, environ=environ, transport=transport)
            try:
                refuse_unpayable(panel.teachers, config.replay.budget.usd)
                yield panel
            finally:
                await panel.aclose()
        except (ProviderError, StoreError) as error:
            raise ReplayRefused(str(error)) from error


def cached_in(answers: Path | None, config: Config, settings: PanelSettings) -> PanelSettings:
    """Return the settings with a file of answers, where the config names none."""
    if answers is None or config.replay.cache is not None:
        return settings
    return replace(settings, cache=answers)


def refuse_unpayable(teachers: Sequence[TeacherEndpoint], usd: float) -> None:
    """Raise `ReplayRefused` for a teacher that costs money when the spending limit is 0."""
    for teacher in teachers if usd == 0 else ():
        if teacher.prices is None or not teacher.prices.free:
            raise ReplayRefused(
                f"the ceiling is 0 dollars but teacher {teacher.name!r} costs money, so it could "
                "never be queried: say with --max-usd (max_total_usd in Python) what this may cost"
            )


@contextmanager
def served_experts(
    config: Config, task: Task | None, environ: Environ
) -> Iterator[tuple[str, Environ]]:
    """Serve the builtin teachers, if any; yield their URL and the environment with their key."""
    builtin = [teacher for teacher in config.replay.teachers if teacher.kind == "builtin"]
    if not builtin or task is None:
        refuse_builtin(config)
        yield UNSERVED, environ
        return
    token = new_token()
    experts = [Expert(teacher.name, teacher.error_rate or 0.0) for teacher in builtin]
    with ExpertServer(ExpertPanel(task, config.run.seed, experts), token) as server:
        yield server.base_url, {**environ, TOKEN_ENV: token}


def refuse_builtin(config: Config) -> None:
    """Raise `ReplayRefused` for a teacher that needs the task of a run."""
    for teacher in config.replay.teachers:
        if teacher.kind == "builtin":
            raise ReplayRefused(
                f"teacher {teacher.name!r} is builtin, and knows the answers to traces of a run "
                "only: give such traces, or another teacher"
            )


def patient(settings: PanelSettings) -> PanelSettings:
    """Return the settings of a job that is not time-critical: rate limits are waited for."""
    return replace(settings, replicas=1, timeouts=replace(settings.timeouts, line_s=math.inf))


async def priced_teachers(
    config: Config,
    *,
    environ: Environ = os.environ,
    transport: httpx.AsyncBaseTransport | None = None,
) -> list[TeacherEndpoint]:
    """Return the teachers with all known prices; sends no query and leaves no file.

    Raises `ReplayRefused` for a teacher without a usable key or address.
    """
    with TemporaryDirectory(prefix="composer-mesh-") as folder:
        settings = panel_settings(config, UNSERVED, Path(folder), ())
    rules = replace(settings.budget, unknown_prices="allow")
    async with ProviderClient(settings.timeouts, environ=environ, transport=transport) as client:
        try:
            for teacher in settings.teachers:
                if teacher.name not in settings.own:
                    client.check(teacher)
            return [await with_prices(client, teacher, rules) for teacher in settings.teachers]
        except ProviderError as error:
            raise ReplayRefused(str(error)) from error


class QueriedPanel(Protocol):
    """The queried object, a `TeacherPanel` outside tests."""

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]: ...

    def stop_waiting(self) -> None: ...


class Stopped(Exception):
    """The client was stopped before this state had its answers."""


class TeacherClient:
    """A `Teachers` port for one event loop, over a panel that waits for its teachers."""

    def __init__(self, panel: QueriedPanel, concurrency: int) -> None:
        self._panel, self._slots = panel, asyncio.Semaphore(concurrency)
        self._stopping, self._asking = False, 0
        self._idle = asyncio.Event()

    def stop(self) -> None:
        """Send no new query. Queries in flight complete before waiting ones raise `Stopped`."""
        self._stopping = True
        self._panel.stop_waiting()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        while self._asking:
            await self._idle.wait()

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """Return the replies of `n` teachers. Waits for a slot and for the panel.

        Raises `Stopped` if the client was stopped before all of them were queried.
        """
        async with self._slots:
            replies = [] if self._stopping else await self._ask(state, n)
            if self._stopping and (not replies or any(map(_was_refused, replies))):
                await self.idle()  # a caller that fails on this must not cancel paid answers
                raise Stopped
            return replies

    async def _ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        self._asking += 1
        self._idle.clear()
        try:
            return await self._panel.ask(state, n)
        finally:
            self._asking -= 1
            if not self._asking:
                self._idle.set()


def is_short(replies: Sequence[TeacherReply]) -> bool:
    """Return whether a teacher was not queried because of the budget."""
    return any(
        isinstance(reply, TeacherFailure) and reply.kind is FailureKind.BUDGET for reply in replies
    )


def _was_refused(reply: TeacherReply) -> bool:
    """Return whether a teacher was not queried although it might have been after a wait."""
    return isinstance(reply, TeacherFailure) and reply.kind in (
        FailureKind.BUDGET,
        FailureKind.SUSPENDED,
    )

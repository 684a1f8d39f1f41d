"""Teachers of an offline replay: the server of the builtin ones, the panel, and its client.

The panel is the same as in a run, in this process and without a mesh.

The client bounds concurrency, and waits for budget and suspensions. A request reserves its highest
possible cost, usually far more than its actual cost. If a teacher was refused for the budget while
paid requests are in flight, the state waits for those to be settled and queries again; the refusal
is final when no request in flight could free budget. If a teacher is suspended after too many
failures, the state waits for the suspension and queries again; after `RESTS` waits in a row without
an answer it is not waited for any more. Answers that a state already has are kept.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
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
from composer_mesh.actors.provider.client import ProviderClient, TeacherEndpoint
from composer_mesh.actors.provider.errors import ProviderError
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    TeacherAnswer,
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
        settings = patient(panel_settings(config, url, folder, tools))
        if answers is not None and config.replay.cache is None:
            settings = replace(settings, cache=answers)
        try:
            panel = await TeacherPanel.open(settings, environ=environ, transport=transport)
            try:
                refuse_unpayable(panel.teachers, config.replay.budget.usd)
                yield panel
            finally:
                await panel.aclose()
        except (ProviderError, StoreError) as error:
            raise ReplayRefused(str(error)) from error


def refuse_unpayable(teachers: Sequence[TeacherEndpoint], usd: float) -> None:
    """Raise `ReplayRefused` for a teacher that costs money when the spending limit is 0."""
    for teacher in teachers if usd == 0 else ():
        if teacher.prices is None or not teacher.prices.free:
            raise ReplayRefused(
                f"the ceiling is 0 dollars but teacher {teacher.name!r} costs money, so it could "
                "never be asked: say with --max-usd what this may cost"
            )


@contextmanager
def served_experts(
    config: Config, task: Task | None, environ: Environ
) -> Iterator[tuple[str, Environ]]:
    """Serve the builtin teachers, if any; yield their URL and the environment with their key."""
    builtin = [teacher for teacher in config.replay.teachers if teacher.kind == "builtin"]
    if not builtin:
        yield UNSERVED, environ
        return
    if task is None:
        raise ReplayRefused(
            f"teacher {builtin[0].name!r} is builtin, and knows the answers to traces of a run "
            "only: give such traces, or another teacher"
        )
    token = new_token()
    experts = [Expert(teacher.name, teacher.error_rate or 0.0) for teacher in builtin]
    with ExpertServer(ExpertPanel(task, config.run.seed, experts), token) as server:
        yield server.base_url, {**environ, TOKEN_ENV: token}


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


RESTS = 3
BY_A_PERSON = (FailureKind.AUTH, FailureKind.PAYMENT)
"""Failures that only a person can fix."""


class QueriedPanel(Protocol):
    """The queried object, a `TeacherPanel` outside tests."""

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]: ...


class Stopped(Exception):
    """The client was stopped before this state had its answers."""


class TeacherClient:
    """A `Teachers` port for one event loop. `rest_s` is the duration of a teacher's suspension."""

    def __init__(self, panel: QueriedPanel, concurrency: int, rest_s: float) -> None:
        self._panel, self._slots = panel, asyncio.Semaphore(concurrency)
        self._rests = _Rests(rest_s)
        self._stopping = asyncio.Event()
        self._asking = self._settled = 0
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Send no new query. Queries in flight complete before waiting ones raise `Stopped`."""
        self._stopping.set()
        self._tell()

    async def idle(self) -> None:
        """Wait until nothing is in flight."""
        while self._asking:
            await self._changed.wait()

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """Return the replies of `n` teachers. Waits for a slot, answers, budget and suspensions.

        Raises `Stopped` if the client was stopped first.
        """
        async with self._slots:
            seen, replies = self._settled, await self._ask(state, n)
            while await self._may_ask_again(replies, seen):
                seen = self._settled
                replies = together(replies, await self._ask(state, n))
            return replies

    async def _ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        if self._stopping.is_set():
            await self.idle()  # a caller that fails on this must not cancel paid answers
            raise Stopped
        self._asking += 1
        try:
            replies = await self._panel.ask(state, n)
        finally:
            self._asking -= 1
            self._tell()
        self._settled += any(_was_paid(reply) for reply in replies)
        self._rests.answered(replies)
        return replies

    async def _may_ask_again(self, replies: Sequence[TeacherReply], seen: int) -> bool:
        """Wait for the cause of a refusal to pass; return False if no retry can help."""
        if is_short(replies) and await self._settled_since(seen):
            return True
        return await self._rests.over(_refused(replies, FailureKind.SUSPENDED), self._stopping)

    async def _settled_since(self, seen: int) -> bool:
        """Return whether a paid request was settled since; wait while one may still be."""
        while self._settled == seen and self._asking and not self._stopping.is_set():
            await self._changed.wait()
        return self._settled != seen or self._stopping.is_set()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Rests:
    """Counts the waits for each suspended teacher without an answer, over all states."""

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._in_vain: Counter[str] = Counter()
        self._counted: dict[str, float] = {}

    def answered(self, replies: Sequence[TeacherReply]) -> None:
        """Record which teachers are worth waiting for."""
        for reply in replies:
            if isinstance(reply, TeacherFailure):
                if reply.kind in BY_A_PERSON:
                    self._in_vain[reply.teacher] = RESTS
            elif not reply.cached:
                self._in_vain.pop(reply.teacher, None)

    async def over(self, teachers: Sequence[str], stopping: asyncio.Event) -> bool:
        """Wait one suspension, or until the client stops; return False if no wait can help."""
        hopeful = [teacher for teacher in teachers if self._in_vain[teacher] < RESTS]
        if not hopeful:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), self._rest_s)
        now = asyncio.get_running_loop().time()
        for teacher in hopeful:
            if now - self._counted.get(teacher, -self._rest_s) >= self._rest_s:
                self._in_vain[teacher] += 1
                self._counted[teacher] = now
        return True


def is_short(replies: Sequence[TeacherReply]) -> bool:
    """Return whether a teacher was not queried because of the budget."""
    return bool(_refused(replies, FailureKind.BUDGET))


def together(earlier: Sequence[TeacherReply], later: Sequence[TeacherReply]) -> list[TeacherReply]:
    """Merge two rounds: answers are kept, failures are replaced by the later reply."""
    again = {reply.teacher: reply for reply in later}
    return [_better(reply, again.get(reply.teacher, reply)) for reply in earlier]


def _better(earlier: TeacherReply, later: TeacherReply) -> TeacherReply:
    if isinstance(earlier, TeacherAnswer) or later is earlier:
        return earlier
    return replace(later, usd=earlier.usd + later.usd)


def _was_paid(reply: TeacherReply) -> bool:
    return isinstance(reply, TeacherAnswer) and reply.usd > 0


def _refused(replies: Sequence[TeacherReply], kind: FailureKind) -> list[str]:
    return [
        reply.teacher
        for reply in replies
        if isinstance(reply, TeacherFailure) and reply.kind is kind
    ]

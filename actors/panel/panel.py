"""Queries several teachers about a frozen state: cached answers first, then the providers.

Combines the provider client, the budget ledger and the response cache.

The cache holds models' answers by content in SQLite: repeated and resumed runs pay once. Its key is
all that an answer depends on: endpoint, model settings and messages. It excludes the seed and the
teacher's name. Values are JSON, and the first value of a key stays. Several processes may share a
file.

Counts and costs of a panel's requests by teacher, since it was opened in this process.

The ledger has the costs of the complete run.

Prices of each teacher's requests, resolved before the first request is sent.

A price missing from the config is read from the provider's price list, if it has one.
`provider.money` turns prices into bounds.
"""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from composer_mesh.actors.panel.configured import PanelSettings
from composer_mesh.actors.panel.ledger import Ledger, LedgerMeter
from composer_mesh.actors.provider.client import ClientClosed, ProviderClient, RequestCoalescer
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import BreakerVerdict, ProviderBudgetError, ProviderError
from composer_mesh.actors.sqlite_file import FileKind, SqliteFile, StoreError
from composer_mesh.configs.validation import fail_fast
from composer_mesh.rollouts.budget import BudgetReport, BudgetRules, Prices, UnknownPrice, dollars
from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
)
from composer_mesh.rollouts.traces import Message

TABLE = "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID"


def content_key(content: Any) -> str:
    """Return a hash of JSON content; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_ADAPTER = fail_fast(TeacherAnswer)


def answer_settings(teacher: TeacherEndpoint) -> dict[str, Any]:
    """Return the settings an answer depends on, without the key, limits and prices."""
    routing = teacher.routing
    if routing is not None:
        routing = {key: value for key, value in routing.items() if key != "max_price"}
    return {
        "base_url": teacher.base_url.rstrip("/"),
        "model": teacher.model,
        "max_tokens": teacher.max_tokens,
        "temperature": teacher.temperature,
        "routing": routing,
    }


def question_key(
    teacher: TeacherEndpoint, copy: int, state: FrozenState, tools: list[dict[str, Any]]
) -> str:
    """Return the cache key of one request; `copy` numbers teachers with identical settings."""
    question = {"copy": copy, "messages": state.messages, "tools": tools}
    return content_key({**answer_settings(teacher), **question})


class ResponseCache:
    """A thread-safe cache of models' answers; opened by its constructor, closed by `close`.

    `setting` is the config key of the file, for error messages.
    """

    def __init__(self, path: Path, setting: str = "replay.cache") -> None:
        kind = FileKind(
            purpose="keep models' answers",
            repair=f"name another file with {setting}, or move this one away",
            application_id=0x434D4331,
            version=1,
            tables=(TABLE,),
        )
        self._file = SqliteFile(path, kind)

    def get(self, key: str, teacher: str) -> TeacherAnswer | None:
        """Return the cached answer under this teacher's name, at no cost.

        Raises StoreError if the file cannot be read, or its value is damaged.
        """
        with self._file.reading() as rows:
            found = rows.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        try:
            answer = _ADAPTER.validate_json(found[0])
        except ValueError:
            raise self._file.error(f"the value of {key[:12]} is damaged") from None
        return replace(answer, teacher=teacher, usd=0.0, usd_known=True, cached=True)

    def put(self, key: str, answer: TeacherAnswer) -> None:
        """Store an answer unless the key exists; raises StoreError if the file is unusable."""
        text = _ADAPTER.dump_json(answer).decode()
        with self._file.transaction() as rows:
            rows.execute("INSERT OR IGNORE INTO kept VALUES (?, ?)", (key, text))

    def close(self) -> None:
        self._file.close()


@dataclass
class TeacherTally:
    """Counts and dollars of one teacher."""

    answered: int = 0
    cached: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0

    def count(self, reply: TeacherReply) -> None:
        self.usd += reply.usd
        if isinstance(reply, TeacherFailure):
            self.failed[reply.kind.value] += 1
        elif reply.cached:
            self.cached += 1
        else:
            self.answered += 1

    def details(self) -> dict[str, Any]:
        """Return the tally as JSON values."""
        return {
            "answered": self.answered,
            "cached": self.cached,
            "failed": dict(self.failed),
            "usd": self.usd,
        }


def replies_by_kind(tallies: Iterable[TeacherTally]) -> dict[str, int]:
    """Return the number of replies that were `answered`, `cached`, or failed, by failure kind."""
    replies: Counter[str] = Counter()
    for tally in tallies:
        replies.update(tally.failed)
        replies.update(answered=tally.answered, cached=tally.cached)
    return {kind: count for kind, count in replies.items() if count}


async def with_prices(
    client: ProviderClient, teacher: TeacherEndpoint, rules: BudgetRules
) -> TeacherEndpoint:
    """Return the teacher with its prices, as far as they are known.

    Raises ProviderBudgetError if they are unknown and such teachers are refused, and the provider's
    error if its list cannot be read.
    """
    if teacher.prices is not None:
        return teacher
    listed = None if teacher.routing is None else await _listed(client, teacher, rules)
    if listed is None and rules.unknown_prices == "refuse":
        raise ProviderBudgetError(teacher.name, str(UnknownPrice()))
    return replace(teacher, prices=listed)


async def _listed(
    client: ProviderClient, teacher: TeacherEndpoint, rules: BudgetRules
) -> Prices | None:
    """Return the listed price; an unreadable list counts as empty if unknown prices are allowed."""
    try:
        return await client.prices(teacher)
    except ProviderError:
        if rules.unknown_prices == "refuse":
            raise
        return None


T = TypeVar("T")


@dataclass(frozen=True)
class TeacherSlot:
    """A teacher of the panel; `copy` numbers teachers with identical request settings."""

    teacher: TeacherEndpoint
    copy: int
    own: bool


class TeacherPanel:
    """Queries teachers on one event loop, coalescing equal queries; created by `open`."""

    def __init__(
        self,
        settings: PanelSettings,
        slots: list[TeacherSlot],
        client: ProviderClient,
        meter: LedgerMeter,
        kept: ResponseCache | None,
        opened: AsyncExitStack,
        give_up: asyncio.Event | None = None,
    ) -> None:
        self._give_up = give_up
        self._settings, self._slots, self._opened = settings, slots, opened
        self._client, self._meter, self._kept = client, meter, kept
        self._asking = RequestCoalescer[TeacherReply]()
        self._tallies = {slot.teacher.name: TeacherTally() for slot in slots}
        self._unkept, self._closed = 0, False
        self._clock = asyncio.get_running_loop().time

    @classmethod
    async def open(
        cls,
        settings: PanelSettings,
        *,
        environ: Mapping[str, str] = os.environ,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> Self:
        """Check keys, addresses and files, and fetch prices; sends no completion request.

        With `timeouts.line_s` queries wait for suspended teachers, and for reserved money, until
        `stop_waiting`. Raises a ProviderError for a teacher that cannot be queried, StoreError for
        a file that cannot be used. Waits for the price list if one has to be read.
        """
        give_up = asyncio.Event() if settings.timeouts.line_s > 0 else None
        async with AsyncExitStack() as opened:
            # In a thread: it reads the certificates of all authorities, half a second of work.
            client = await asyncio.to_thread(
                ProviderClient,
                settings.timeouts,
                settings.retries,
                settings.breaker,
                environ=environ,
                transport=transport,
                give_up=give_up,
            )
            opened.push_async_callback(client.aclose)
            for teacher in settings.teachers:
                client.check(teacher)
            slots = await _slots(client, settings)
            path = settings.ledger if settings.pays else None
            ledger = await asyncio.to_thread(Ledger, path, settings.budget, settings.run)
            meter = LedgerMeter(ledger, give_up)
            opened.push_async_callback(meter.aclose)
            kept = None
            if settings.cache is not None and settings.pays:
                setting = f"{settings.section}.cache"
                kept = await asyncio.to_thread(ResponseCache, settings.cache, setting)
                opened.callback(kept.close)
            # Once more, because it must be the first to close: it then has charges to write.
            opened.push_async_callback(client.aclose)
            return cls(settings, slots, client, meter, kept, opened.pop_all(), give_up)

    @property
    def teachers(self) -> list[TeacherEndpoint]:
        """The teachers in their order, with their prices where known."""
        return [slot.teacher for slot in self._slots]

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """Query `n` teachers concurrently; the state's seed rotates which ones.

        Waits until each has answered or failed, at most `total_s`. A failure is a value in the list
        and does not affect other teachers' answers. Cancelling drops the replies: requests already
        paid for continue and are cached. Raises ClientClosed after `aclose`.
        """
        if self._closed:
            raise ClientClosed
        if not 1 <= n <= len(self._slots):
            raise ValueError(
                f"n is {n}, but {len(self._slots)} teachers are loaded: query 1 to that many"
            )
        queried = chosen_teachers(self._slots, state.seed, n)
        return list(await asyncio.gather(*(self._reply(slot, state) for slot in queried)))

    async def ask_one(self, name: str, messages: Sequence[Message]) -> TeacherReply:
        """Query one teacher by its name. Waits as `ask` does, and returns a failure as a value."""
        if self._closed:
            raise ClientClosed
        for slot in self._slots:
            if slot.teacher.name == name:
                return await self._reply(slot, FrozenState("", list(messages), 0))
        known = ", ".join(self._tallies)
        raise ValueError(f"there is no {self._settings.role} {name!r}: name one of {known}")

    def stop_waiting(self) -> None:
        """Let queries wait no longer for suspended teachers, and for money that is reserved."""
        if self._give_up is not None:
            self._give_up.set()
            self._meter.wake()

    async def report(self) -> BudgetReport:
        """Return the ledger's report on this run, over all its processes."""
        return await self._meter.report()

    def details(self) -> dict[str, Any]:
        """Return counts and dollars since the panel was opened, as JSON values."""
        run, clients = self._meter.run, self._client.details()
        return {
            "teachers": {
                name: {**tally.details(), **clients.get(name, {})}
                for name, tally in self._tallies.items()
            },
            "replies": replies_by_kind(self._tallies.values()),
            "usd": sum(tally.usd for tally in self._tallies.values()),
            "budget": {
                "ceiling_usd": self._settings.budget.usd,
                "spent_usd": dollars(run.spent),
                "reserved_usd": dollars(run.reserved),
                "overruns": run.overruns,
            },
            "unkept_answers": self._unkept,
            "unwritten_charges": self._meter.unwritten,
        }

    async def aclose(self) -> None:
        """Cancel running requests, which charges them in full, then close connections and files."""
        self._closed = True
        await self._asking.aclose()
        await self._opened.aclose()

    async def _reply(self, slot: TeacherSlot, state: FrozenState) -> TeacherReply:
        key, began = self._key(slot, state), self._clock()
        reply, shared = await self._asking.get(key, partial(self._find, slot, state, key))
        if not shared:
            return reply
        reply = replace(reply, usd=0.0, latency_s=self._clock() - began)
        if isinstance(reply, TeacherAnswer):
            # Which of several callers is first is chance, and free requests save nothing.
            reply = replace(reply, usd_known=True, cached=not slot.own)
        else:
            reply = replace(reply, sent=False)
        self._tallies[slot.teacher.name].count(reply)
        return reply

    def _key(self, slot: TeacherSlot, state: FrozenState) -> str:
        queried = replace(slot.teacher, base_url="") if self._settings.any_address else slot.teacher
        key = question_key(queried, slot.copy, state, self._tools(state))
        return f"{key} {state.seed}" if slot.own else key  # free teachers are queried by seed

    async def _find(self, slot: TeacherSlot, state: FrozenState, key: str) -> TeacherReply:
        teacher, began = slot.teacher, self._clock()
        kept = None if slot.own else self._kept
        reply: TeacherReply | None = None
        try:
            if kept is not None:
                reply = await asyncio.to_thread(kept.get, key, teacher.name)
            if reply is None:
                reply = await self._ask(slot, state)
                await self._keep(kept, key, reply)
            else:
                reply = replace(reply, latency_s=self._clock() - began)
        except ProviderError as error:
            usd, took = dollars(error.charged), self._clock() - began
            about = self._settings
            text = error.for_role(about.role, about.section, about.budget_repair)
            sent = error.verdict is not BreakerVerdict.NOTHING
            reply = TeacherFailure(teacher.name, error.kind, text, took, usd, sent, error.status)
        except StoreError as error:  # else each query would pay again
            took = self._clock() - began
            reply = TeacherFailure(teacher.name, FailureKind.BUDGET, str(error), took)
        self._tallies[teacher.name].count(reply)
        return reply

    def _tools(self, state: FrozenState) -> list[dict[str, Any]]:
        return self._settings.tools_of.get(state.task, self._settings.tools)

    async def _ask(self, slot: TeacherSlot, state: FrozenState) -> TeacherAnswer:
        return await self._client.complete(
            slot.teacher,
            state.messages,
            self._tools(state),
            seed=state.seed + slot.copy,
            meter=None if slot.own else self._meter,
        )

    async def _keep(self, kept: ResponseCache | None, key: str, answer: TeacherAnswer) -> None:
        if kept is None:
            return
        try:
            await asyncio.to_thread(kept.put, key, answer)
        except StoreError:
            self._unkept += 1  # the answer is returned all the same


def chosen_teachers(teachers: Sequence[T], seed: int, n: int) -> list[T]:
    """Return `n` consecutive teachers from place `seed` (modulo), in configured order."""
    start = seed % len(teachers)
    places = sorted((start + step) % len(teachers) for step in range(n))
    return [teachers[place] for place in places]


async def _slots(client: ProviderClient, settings: PanelSettings) -> list[TeacherSlot]:
    priced = await asyncio.gather(
        *(with_prices(client, teacher, settings.budget) for teacher in settings.teachers)
    )
    slots: list[TeacherSlot] = []
    for teacher in priced:
        copy = sum(answer_settings(teacher) == answer_settings(slot.teacher) for slot in slots)
        shared = _share(teacher, settings.replicas)
        slots.append(TeacherSlot(shared, copy, teacher.name in settings.own))
    return slots


def _share(teacher: TeacherEndpoint, replicas: int) -> TeacherEndpoint:
    """Return one replica's share of a teacher's limits, at least one request."""
    rate = teacher.requests_per_minute
    return replace(
        teacher,
        concurrency=max(1, teacher.concurrency // replicas),
        requests_per_minute=None if rate is None else max(1, rate // replicas),
    )

"""The hint-writer actor: has a language model write hints for error sites.

Prompts are in `rollouts.hints`; cache, budget and requests in `actors.hint_writer`. Whether
a hint may be used is decided elsewhere. Neither this module nor its imports load torch.

Writes hints with a language model: from the cache, else from the provider within the budget.

Every request gets a reply; a failure is a reply without text, because templates are the fallback.
Equal requests in flight are coalesced.

The content cache of a hint writer's answers.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.panel.ledger import Ledger, LedgerMeter
from composer_mesh.actors.panel.response_cache import ContentCache
from composer_mesh.actors.provider.client import (
    BreakerRules,
    ProviderClient,
    RequestCoalescer,
    Retries,
    TeacherEndpoint,
    Timeouts,
)
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.actors.sqlite_file import StoreError
from composer_mesh.configs.sdpo import HintWriterConfig
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.budget import BudgetRules
from composer_mesh.rollouts.hints import HintReply, HintRequest, one_line_hint
from composer_mesh.rollouts.money import dollars, nano


class HintCache(ContentCache):
    """Thread-safe cache of texts; opened by its constructor, closed by `close`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, what="hints", setting="sdpo.hints.llm.cache")

    def get(self, key: str) -> str | None:
        """Return the cached answer; raises StoreError if the file cannot be read."""
        text = super().get(key)
        if text is not None and not isinstance(text, str):
            raise self.damaged(key)
        return text


NO_TEXT = "its answer holds no plain text"
REPAIR = "raise sdpo.hints.llm.budget_requests or sdpo.hints.llm.budget_usd"


def open_meter(
    writer: TeacherEndpoint, config: HintWriterConfig, sent: int = 0, spent_usd: float = 0.0
) -> LedgerMeter:
    """Return a writer's in-memory budget, with the requests and dollars already used."""
    rules = BudgetRules(
        usd=config.budget_usd,
        unknown_prices="allow",
        assumed_usd=config.assumed_usd,
        requests=config.budget_requests,
    )
    ledger = Ledger(None, rules, "hints")
    ledger.add_earlier(writer.name, nano(spent_usd), sent)
    return LedgerMeter(ledger)


@dataclass
class HintService:
    """Hint service of one event loop; limits, timeouts and breaker are the client's."""

    client: ProviderClient
    writer: TeacherEndpoint
    cache: HintCache
    meter: LedgerMeter
    counts: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""
    _asking: RequestCoalescer[HintReply] = field(default_factory=RequestCoalescer)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """Return one reply per request, in order. Waits as long as the client does."""
        replies = await asyncio.gather(*map(self._reply, requests))
        self.counts.update(reply.origin for reply in replies)
        return list(replies)

    async def aclose(self) -> None:
        """Cancel running requests, then close the connections and the cache."""
        await self._asking.aclose()
        await self.client.aclose()
        await self.meter.aclose()
        self.cache.close()

    async def _reply(self, request: HintRequest) -> HintReply:
        key = request.key(self.writer.model)
        reply, shared = await self._asking.get(key, partial(self._find, request, key))
        if shared:
            return HintReply(reply.text, "cached" if reply.text else "none", reason=reply.reason)
        return reply

    async def _find(self, request: HintRequest, key: str) -> HintReply:
        text: str | None = None
        try:
            text = await asyncio.to_thread(self.cache.get, key)
        except StoreError as error:
            return self._without(str(error))  # it would be paid for each time
        if text is None:
            return await self._ask(request, key)
        return HintReply(text, "cached") if text else self._without(NO_TEXT)

    async def _ask(self, request: HintRequest, key: str) -> HintReply:
        """Send one request if the budget allows it."""
        meter = _WriterMeter(self.meter)
        try:
            answer = await self.client.complete(
                self.writer, request.messages, [], seed=0, meter=meter
            )
        except ProviderError as error:
            refused = isinstance(error, ProviderBudgetError)
            reason = f"{error.text}: {REPAIR}" if refused else f"{error.kind.value}: {error.text}"
            return replace(self._without(reason), sent=meter.sent, usd=dollars(error.charged))
        text = one_line_hint(answer.action_text)
        try:  # also without text, or each run would pay for the same answer again
            await asyncio.to_thread(self.cache.put, key, text)
        except StoreError as error:
            self.last_failure = str(error)
        if not text:
            return replace(self._without(NO_TEXT), sent=True, usd=answer.usd)
        return HintReply(text, "llm", sent=True, usd=answer.usd)

    def _without(self, reason: str) -> HintReply:
        self.last_failure = reason
        return HintReply("", "none", reason=reason)


class _WriterMeter:
    """Meter of one query that ignores its bound: `assumed_usd` is reserved."""

    def __init__(self, meter: LedgerMeter) -> None:
        self._meter, self.sent = meter, False

    async def reserve(self, teacher: str, _: int | None) -> int:
        reservation = await self._meter.reserve(teacher, None)
        self.sent = True
        return reservation

    async def settle(self, reservation: int, charge: int | None) -> int:
        return await self._meter.settle(reservation, charge)


ONCE = Retries(attempts=1)
"""Hints are not retried: a template is the fallback."""
PATIENCE = BreakerRules(failures=4, rest_s=30.0)


class HintWriterActor(MeshActor):
    """One per run, only with writer = "llm".

    controller -- HintRequests --> HintWriterActor == HTTP ==> one model
               <-- HintReplies --
    """

    kind: ClassVar[str] = "hint_writer"

    def __init__(self) -> None:
        self._hint_service: HintService | None = None
        self._running = 0

    @concurrent_endpoint
    async def load(
        self,
        writer: TeacherEndpoint,
        config: HintWriterConfig,
        cache: Path,
        sent: int = 0,
        spent_usd: float = 0.0,
        keys: Keys | None = None,
    ) -> None:
        """Open cache and connections; raises if the key, address or file is unusable.

        Sends no request. Replaces what an earlier `load` opened, including its budget, of which
        `sent` requests and `spent_usd` dollars are already used. Without `keys`, the API key is
        read from this process's environment.
        """
        writer = replace(writer, concurrency=config.max_concurrent)
        timeouts = Timeouts(total_s=config.timeout_s)
        client = await asyncio.to_thread(
            ProviderClient,
            timeouts,
            ONCE,
            PATIENCE,
            environ=os.environ if keys is None else keys,
        )
        client.check(writer)
        meter = open_meter(writer, config, sent, spent_usd)
        hint_service = HintService(client, writer, await asyncio.to_thread(HintCache, cache), meter)
        await self._close_service()
        self._hint_service = hint_service

    @concurrent_endpoint
    async def write(self, requests: list[HintRequest]) -> list[HintReply]:
        """Return one reply per request, in order. Waits at most `timeout_s` for all of them."""
        if self._hint_service is None:
            raise RuntimeError("no writer is loaded: call load first")
        self._running += len(requests)
        self.activity = f"wording {self._running} hints"
        try:
            return await self._hint_service.write(requests)
        finally:
            self._running -= len(requests)
            self.activity = f"wording {self._running} hints" if self._running else "idle"

    @concurrent_endpoint
    async def aclose(self) -> None:
        """Close connections and cache. Running requests fail; `load` opens new ones."""
        await self._close_service()

    def details(self) -> dict[str, Any]:
        if self._hint_service is None:
            return {"replies": {}}
        return {
            "replies": dict(self._hint_service.counts),
            "requests": self._hint_service.meter.run.requests,
            "usd": dollars(self._hint_service.meter.run.spent),
            "last_failure": self._hint_service.last_failure,
        }

    async def _close_service(self) -> None:
        hint_service, self._hint_service = self._hint_service, None
        if hint_service is not None:
            await hint_service.aclose()

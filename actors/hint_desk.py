"""Where hints are worded: the cache first, then the provider while the budget lasts.

Every question gets a reply; a failure is a reply without words, because a template stands ready.
Equal questions share one request. No actor and no rule about what a good hint is.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from composer_mesh.actors.hint_cache import HintCache, HintCacheError
from composer_mesh.actors.provider import ProviderClient, TeacherEndpoint
from composer_mesh.actors.provider_errors import ProviderError
from composer_mesh.rollouts.hint_budget import HintBudget
from composer_mesh.rollouts.hint_prompts import HintReply, HintRequest, tidied

PATIENCE = 4
"""Failures in a row after which the provider is left alone for a while."""
REST_S = 30.0
NO_TEXT = "its answer holds no plain text"


@dataclass
class HintDesk:
    """Belongs to one event loop. `timeout_s` bounds one `write`, whatever it has to wait for."""

    client: ProviderClient
    writer: TeacherEndpoint
    cache: HintCache
    budget: HintBudget
    timeout_s: float
    max_concurrent: int
    counts: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""
    _asking: dict[str, asyncio.Task[HintReply]] = field(default_factory=dict)
    _failures: int = 0
    _rest_until: float = 0.0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_concurrent)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """A reply for each request, in order. Waits at most `timeout_s` for all of them."""
        replies = await asyncio.gather(*map(self._reply, requests))
        self.counts.update(reply.origin for reply in replies)
        return list(replies)

    async def aclose(self) -> None:
        """Ends what is under way, then closes the connections and the cache."""
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await self.client.aclose()
        self.cache.close()

    async def _reply(self, request: HintRequest) -> HintReply:
        key = request.key(self.writer.model)
        if key in self._asking:
            shared = await asyncio.shield(self._asking[key])
            return HintReply(shared.text, "cached" if shared.text else "none", reason=shared.reason)
        task = asyncio.create_task(self._find(request, key))
        self._asking[key] = task
        task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(task)

    async def _find(self, request: HintRequest, key: str) -> HintReply:
        text: str | None = None
        try:
            text = await asyncio.to_thread(self.cache.get, key)
        except HintCacheError as error:
            return self._without(str(error))  # what cannot be kept would be paid again and again
        if text is None:
            return await self._ask(request, key)
        return HintReply(text, "cached") if text else self._without(NO_TEXT)

    async def _ask(self, request: HintRequest, key: str) -> HintReply:
        """One request; the slot, the answer and the retries share `timeout_s`."""
        sent: list[float] = []
        try:
            async with asyncio.timeout(self.timeout_s), self._slots:
                if refusal := self._refusal():
                    return self._without(refusal)
                reserved = self.budget.reserve()
                if reserved is None:
                    return self._without(self.budget.refusal)
                sent.append(reserved)
                answer = await self.client.complete(self.writer, request.messages, [], seed=0)
        except TimeoutError:
            return self._failed(f"no answer within {self.timeout_s} s", sent, None)
        except ProviderError as error:
            return self._failed(f"{error.kind.value}: {error.text}", sent, None)
        except asyncio.CancelledError:
            self._settle(sent, None)
            raise
        usd = self._settle(sent, answer.usd if answer.usd_known else None)
        self._failures, text = 0, tidied(answer.action_text)
        try:  # also without words, or each run would pay for the same answer again
            await asyncio.to_thread(self.cache.put, key, self.writer.model, text)
        except HintCacheError as error:
            self.last_failure = str(error)
        if not text:
            return replace(self._without(NO_TEXT), sent=True, usd=usd)
        return HintReply(text, "llm", sent=True, usd=usd)

    def _refusal(self) -> str:
        if asyncio.get_running_loop().time() < self._rest_until:
            return f"{PATIENCE} requests failed in a row: the next one waits {REST_S:g} s"
        return ""

    def _failed(self, reason: str, sent: list[float], usd: float | None) -> HintReply:
        charged = self._settle(sent, usd)
        if sent:
            self._failures += 1
        if self._failures >= PATIENCE:
            self._rest_until = asyncio.get_running_loop().time() + REST_S
            self._failures = 0
        return replace(self._without(reason), sent=bool(sent), usd=charged)

    def _settle(self, sent: list[float], usd: float | None) -> float:
        return self.budget.settle(sent[0], usd) if sent else 0.0

    def _without(self, reason: str) -> HintReply:
        self.last_failure = reason
        return HintReply("", "none", reason=reason)

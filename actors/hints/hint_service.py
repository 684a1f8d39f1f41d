"""Where hints are worded: the cache first, then the provider while the budget lasts.

Every question gets a reply; a failure is a reply without words, because a template stands ready.
Equal questions share one request. No actor and no rule about what a good hint is.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from composer_mesh.actors.hints.cache import HintCache, HintCacheError
from composer_mesh.actors.provider.client import ProviderClient, TeacherEndpoint
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.rollouts.hint_budget import HintBudget
from composer_mesh.rollouts.hint_prompts import HintReply, HintRequest, tidied
from composer_mesh.rollouts.money import dollars, nano

NO_TEXT = "its answer holds no plain text"


@dataclass
class HintService:
    """Belongs to one event loop. Limits, timeouts and the breaker are the client's."""

    client: ProviderClient
    writer: TeacherEndpoint
    cache: HintCache
    budget: HintBudget
    counts: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""
    _asking: dict[str, asyncio.Task[HintReply]] = field(default_factory=dict)

    async def write(self, requests: Sequence[HintRequest]) -> list[HintReply]:
        """A reply for each request, in order. Waits for them as long as the client does."""
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
        """One request, where its budget allows it."""
        meter = HintMeter(self.budget)
        try:
            answer = await self.client.complete(
                self.writer, request.messages, [], seed=0, meter=meter
            )
        except ProviderError as error:
            refused = isinstance(error, ProviderBudgetError)
            reason = error.text if refused else f"{error.kind.value}: {error.text}"
            return replace(self._without(reason), sent=meter.sent, usd=dollars(error.charged))
        text = tidied(answer.action_text)
        try:  # also without words, or each run would pay for the same answer again
            await asyncio.to_thread(self.cache.put, key, self.writer.model, text)
        except HintCacheError as error:
            self.last_failure = str(error)
        if not text:
            return replace(self._without(NO_TEXT), sent=True, usd=answer.usd)
        return HintReply(text, "llm", sent=True, usd=answer.usd)

    def _without(self, reason: str) -> HintReply:
        self.last_failure = reason
        return HintReply("", "none", reason=reason)


class HintMeter:
    """One question's way to the budget of hints, as the client's meter."""

    def __init__(self, budget: HintBudget) -> None:
        self._budget = budget
        self._reserved: list[float] = []

    @property
    def sent(self) -> bool:
        return bool(self._reserved)

    async def reserve(self, teacher: str, _: int | None) -> int:
        reserved = self._budget.reserve()
        if reserved is None:
            raise ProviderBudgetError(teacher, self._budget.refusal)
        self._reserved.append(reserved)
        return len(self._reserved) - 1

    async def settle(self, reservation: int, charge: int | None) -> int:
        usd = None if charge is None else dollars(charge)
        return nano(self._budget.settle(self._reserved[reservation], usd))

"""The hint-writer actor: has a language model write hints for error sites.

Prompts are in `rollouts.hint_prompts`; cache, budget and requests in `hints.hint_service`. Whether
a hint may be used is decided elsewhere. Neither this module nor its imports load torch.
"""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.hints.hint_service import HintCache, HintService, open_meter
from composer_mesh.actors.provider.client import (
    BreakerRules,
    ProviderClient,
    Retries,
    TeacherEndpoint,
    Timeouts,
)
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.configs.hints import HintWriterConfig
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.hint_prompts import HintReply, HintRequest
from composer_mesh.rollouts.money import dollars

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

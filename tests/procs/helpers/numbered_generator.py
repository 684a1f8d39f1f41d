"""A generator that answers by the number of the turn, and may hang in one of them once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from monarch.actor import concurrent_endpoint

from composer_mesh.mesh.actor import MeshActor, own_endpoint
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult


class NumberedGenerator(MeshActor):
    """The first request of the turn `hangs_at` waits until it is cancelled."""

    kind = "generator"

    @concurrent_endpoint
    async def load(self, log: Path, hangs_at: int) -> None:
        """Set where requests are noted."""
        self._log, self._hangs_at = log, hangs_at

    @concurrent_endpoint
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        turn = int(request.request_id.rpartition("-")[2])
        with self._log.open("a") as log:
            log.write(f"{request.request_id} {request.seed} {len(request.prompt_ids)}\n")
        if turn == self._hangs_at:
            self._hangs_at = -1
            await asyncio.Event().wait()
        rng = random.Random(request.seed + sum(request.prompt_ids))
        ids = [rng.randrange(100, 200) for _ in range(5)]
        logprobs = [-rng.random() for _ in ids]
        return GenerationResult(request.request_id, ids, logprobs, [turn] * 5, "length")

    @concurrent_endpoint
    async def generate_round(
        self, _number: int, _size: int, requests: list[GenerationRequest], _continues: bool
    ) -> list[GenerationResult]:
        return [await own_endpoint(self, "generate")(request) for request in requests]

    @concurrent_endpoint
    async def close_round(self, number: int) -> None:
        """Do nothing: no round waits for others."""

"""A generator whose answers are texts by the turn of the prompt, and which may hang once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.mesh.actor import MeshActor, own_endpoint
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

ANSWER = "<|im_start|>assistant"


class ScriptedGenerator(MeshActor):
    """The first request of the turn `hangs_at` waits until it is cancelled."""

    kind = "generator"

    @concurrent_endpoint
    async def load(self, folder: Path, texts: list[str], hangs_at: int) -> None:
        """Read the tokenizer of a folder, where requests are noted too."""
        self._chat = ChatFormat(load_tokenizer(folder / "tokenizer"), [])
        self._log, self._texts, self._hangs_at = folder / "sampled", texts, hangs_at

    @concurrent_endpoint
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        prompt = self._chat.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        turn = prompt.count(ANSWER) - 1
        self._note("asked", request)
        if turn == self._hangs_at:
            self._hangs_at = -1
            await asyncio.Event().wait()
        ids = self._chat.action(self._texts[turn])
        rng = random.Random(request.seed + sum(request.prompt_ids))
        logprobs = [-rng.random() for _ in ids]
        self._note("answered", request)
        return GenerationResult(request.request_id, ids, logprobs, [turn] * len(ids), "stop")

    def _note(self, what: str, request: GenerationRequest) -> None:
        with self._log.open("a") as log:
            log.write(f"{what} {request.request_id} {request.seed} {len(request.prompt_ids)}\n")

    @concurrent_endpoint
    async def generate_round(
        self, _number: int, _size: int, requests: list[GenerationRequest], _continues: bool
    ) -> list[GenerationResult]:
        return [await own_endpoint(self, "generate")(request) for request in requests]

    @concurrent_endpoint
    async def close_round(self, number: int) -> None:
        """Do nothing: no round waits for others."""

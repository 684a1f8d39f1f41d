"""The actor that samples from the policy and from snapshots of clients' models.

Those used last are kept.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint, context

from composer_mesh.actors.engines.loop import EngineLoop
from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.actors.models.policy import load_model
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.device import own_device
from composer_mesh.mesh.progress import made_progress
from composer_mesh.plugins.tinker.models.messages import ScoreRequest, Scores
from composer_mesh.plugins.tinker.models.snapshots import (
    EmbeddedEngines,
    LoadedSnapshot,
    SnapshotReader,
    VllmEngines,
    scored,
)
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult


class ServedSamplerActor(MeshActor):
    """One process with the policy and some snapshots.

    server -- prompts, a snapshot's file --> ServedSamplerActor -- ids, log-probs --> server
    """

    kind: ClassVar[str] = "served_sampler"

    def __init__(self) -> None:
        self._loading, self._scoring = asyncio.Lock(), asyncio.Lock()
        self._held: OrderedDict[str, LoadedSnapshot] = OrderedDict()
        """The snapshots used last; those in use are never dropped."""
        self._engines: EmbeddedEngines | VllmEngines | None = None
        self._most_held = 1

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the policy; snapshots are loaded when they are requested."""
        import torch

        def work() -> SnapshotReader:
            model = load_model(folder).to(own_device(), getattr(torch, config.generator.dtype))
            return SnapshotReader(model, config.serve.lora_alpha)

        reader = await asyncio.to_thread(work)
        if config.generator.engine == "vllm":
            self._engines = await VllmEngines.start(config, reader, folder, _end)
        else:
            self._engines = EmbeddedEngines(config, reader, _end)
        self._most_held = config.serve.snapshots_in_memory

    @concurrent_endpoint
    async def sample(
        self, snapshot: str, requests: list[GenerationRequest]
    ) -> list[GenerationResult | RequestAborted]:
        """Sample continuations from a snapshot's file, or from the policy for an empty path.

        Waits for the snapshot to be loaded and for the last token of each. Raises `UnusableState`.
        """
        loaded = await self._loaded(snapshot)
        loaded.users += 1
        try:
            answers = [loaded.ask(request) for request in requests]
            try:
                found = await asyncio.gather(*answers, return_exceptions=True)
            finally:
                for answer in answers:
                    answer.cancel()
            return [_outcome(one) for one in found]
        finally:
            loaded.users -= 1

    @concurrent_endpoint
    async def score(
        self, snapshot: str, sequences: list[list[int]], request: ScoreRequest
    ) -> list[Scores]:
        """Return log-probs of given sequences; one call at a time."""
        loaded = await self._loaded(snapshot)
        loaded.users += 1
        try:
            async with self._scoring:
                return await asyncio.to_thread(_scored, loaded.scoring, sequences, request)
        finally:
            loaded.users -= 1

    @concurrent_endpoint
    async def abort(self, request_ids: list[str]) -> int:
        """Abort requests, as `GeneratorActor.abort` does; return how many were unanswered."""
        return sum(
            loop.abort(name, "its client cancelled it")
            for loop in self._loops()
            for name in request_ids
        )

    def details(self) -> dict[str, Any]:
        loops = self._loops()
        return {
            "snapshots": len(self._held),
            "outstanding": sum(loop.outstanding for loop in loops),
            "tokens": sum(loop.tokens for loop in loops),
        }

    def _loops(self) -> list[EngineLoop]:
        """Return the loops of all engines, each once."""
        return list({id(one.loop): one.loop for one in self._held.values()}.values())

    async def _loaded(self, snapshot: str) -> LoadedSnapshot:
        if self._engines is None:
            raise RuntimeError("the sampler has no policy: call load first")
        async with self._loading:
            if snapshot not in self._held:
                self._held[snapshot] = await self._engines.open(snapshot)
                idle = [name for name, one in self._held.items() if not one.users]
                idle.remove(snapshot)
                for name in idle[: max(0, len(self._held) - self._most_held)]:
                    await self._held.pop(name).close()
            self._held.move_to_end(snapshot)
            return self._held[snapshot]


def _end(error: Exception) -> None:
    """End the actor of an engine that failed; its callers may then ask another one."""
    why = f"its engine stopped: {type(error).__name__}: {error}"
    context().actor_instance.abort(why)


def _scored(model: Any, sequences: Sequence[list[int]], request: ScoreRequest) -> list[Scores]:
    found: list[Scores] = []
    for ids in sequences:
        found.append(scored(model, ids, request))
        made_progress(f"{len(found)} of {len(sequences)} sequences")
    return found


def _outcome(found: GenerationResult | BaseException) -> GenerationResult | RequestAborted:
    if isinstance(found, RequestAborted | GenerationResult):
        return found
    raise found

"""The actor that samples from the policy and from snapshots of clients' models.

Each snapshot has an engine of its own; those used last are kept.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint, context

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.actors.engines.loop import EngineLoop, EngineThread
from composer_mesh.actors.engines.port import RequestAborted
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.served_models.messages import ScoreRequest, Scores
from composer_mesh.actors.served_models.scoring import scored
from composer_mesh.actors.served_models.snapshots import LoadedSnapshots, SnapshotReader
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.device import own_device
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult


@dataclass
class _Loaded:
    """A snapshot's engine, the task that runs it, and its model for scores."""

    thread: EngineThread
    loop: EngineLoop
    serving: "asyncio.Task[None]"
    scoring: Any
    users: int = 0

    async def close(self) -> None:
        """Free the engine and its thread. Waits for a step under way."""
        self.serving.cancel()
        await self.loop.close()
        self.thread.end()


class ServedSamplerActor(MeshActor):
    """One process with the policy and some snapshots.

    server -- prompts, a snapshot's file --> ServedSamplerActor -- ids, log-probs --> server
    """

    kind: ClassVar[str] = "served_sampler"

    def __init__(self) -> None:
        self._loading, self._scoring = asyncio.Lock(), asyncio.Lock()
        self._held: LoadedSnapshots[_Loaded] = LoadedSnapshots(1, _in_use)
        self._reader: SnapshotReader | None = None

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the policy; snapshots are loaded when they are asked for."""
        import torch

        def work() -> SnapshotReader:
            model = load_model(folder).to(own_device(), getattr(torch, config.generator.dtype))
            return SnapshotReader(model, config.serve.lora_alpha)

        self._config, self._reader = config, await asyncio.to_thread(work)
        self._held = LoadedSnapshots(config.serve.snapshots_in_memory, _in_use)

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
            answers = [loaded.loop.ask(request) for request in requests]
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
            one.loop.abort(name, "its client cancelled it")
            for one in self._held.all()
            for name in request_ids
        )

    def details(self) -> dict[str, Any]:
        loops = [one.loop for one in self._held.all()]
        return {
            "snapshots": len(loops),
            "outstanding": sum(loop.outstanding for loop in loops),
            "tokens": sum(loop.tokens for loop in loops),
        }

    async def _loaded(self, snapshot: str) -> _Loaded:
        async with self._loading:
            held = self._held.get(snapshot)
            if held is not None:
                return held
            held = await self._read(snapshot)
            for one in self._held.add(snapshot, held):
                await one.close()
            return held

    async def _read(self, snapshot: str) -> _Loaded:
        if self._reader is None:
            raise RuntimeError("the sampler has no policy: call load first")
        models = await asyncio.to_thread(self._reader.read, snapshot)
        thread, config = EngineThread(), self._config
        engine = await thread.run(
            Engine,
            models.sampling,
            config.generator.max_concurrent,
            config.policy.max_context,
            prefix_tokens=config.generator.prefix_tokens,
        )
        loop = EngineLoop(engine, thread)
        return _Loaded(thread, loop, asyncio.create_task(_serve(loop)), models.scoring)


async def _serve(loop: EngineLoop) -> None:
    """Run an engine; its failure ends the actor, whose callers may then ask another one."""
    try:
        await loop.serve()
    except Exception as error:  # supervision boundary: no caller may wait for a dead engine
        why = f"its engine stopped: {type(error).__name__}: {error}"
        context().actor_instance.abort(why)
        raise


def _scored(model: Any, sequences: Sequence[list[int]], request: ScoreRequest) -> list[Scores]:
    return [scored(model, ids, request) for ids in sequences]


def _in_use(one: _Loaded) -> bool:
    return one.users > 0


def _outcome(found: GenerationResult | BaseException) -> GenerationResult | RequestAborted:
    if isinstance(found, RequestAborted | GenerationResult):
        return found
    raise found

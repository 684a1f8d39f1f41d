"""Engines that sample from snapshots of clients' models: an embedded one each, or one vLLM for all.

vLLM computes each snapshot's adapters beside the policy that it loaded once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.actors.engines.embedded import Engine
from composer_mesh.actors.engines.loop import EngineLoop, EngineThread
from composer_mesh.actors.engines.vllm_weights import AdapterSlots
from composer_mesh.configs.schema import Config
from composer_mesh.plugins.tinker.models.adapter_layers import AdapterLayout
from composer_mesh.plugins.tinker.models.model_state import read_state
from composer_mesh.plugins.tinker.models.peft_export import peft_files
from composer_mesh.plugins.tinker.models.snapshots import SnapshotReader
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

Answer = asyncio.Future[GenerationResult]
Failed = Callable[[Exception], None]


@dataclass
class LoadedSnapshot:
    """A snapshot that can be sampled: how to ask, its model for scores, and how to free it."""

    loop: EngineLoop
    ask: Callable[[GenerationRequest], Answer]
    scoring: Any
    close: Callable[[], Awaitable[None]]
    users: int = 0


class SnapshotEngines(Protocol):
    """Loads snapshots, by their files; the empty path is the policy."""

    async def open(self, snapshot: str) -> LoadedSnapshot:
        """Load a snapshot. Raises `UnusableState`."""


class EmbeddedEngines:
    """An embedded engine for each snapshot, whose models share the policy's weights."""

    def __init__(self, config: Config, reader: SnapshotReader, failed: Failed) -> None:
        """`failed` is told the error that ends an engine."""
        self._config, self._reader, self._failed = config, reader, failed

    async def open(self, snapshot: str) -> LoadedSnapshot:
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
        serving = asyncio.create_task(_serve(loop, self._failed))

        async def close() -> None:
            serving.cancel()
            await loop.close()
            thread.end()

        return LoadedSnapshot(loop, loop.ask, models.scoring, close)


class VllmEngines:
    """One vLLM engine for all snapshots, and a second copy of the policy for scores."""

    def __init__(
        self,
        config: Config,
        reader: SnapshotReader,
        loop: EngineLoop,
        thread: EngineThread,
        slots: AdapterSlots,
        failed: Failed,
    ) -> None:
        self._config, self._reader = config, reader
        self._loop, self._thread, self._slots = loop, thread, slots
        self._serving = asyncio.create_task(_serve(loop, failed))

    @classmethod
    async def start(
        cls, config: Config, reader: SnapshotReader, folder: Path, failed: Failed
    ) -> "VllmEngines":
        """Start vLLM with the policy of `folder`; `failed` is told the error that ends it."""
        from composer_mesh.actors.engines.vllm_start import start_for_snapshots

        thread = EngineThread()
        engine, slots = await thread.run(start_for_snapshots, config, folder)
        return cls(config, reader, EngineLoop(engine, thread), thread, slots, failed)

    async def open(self, snapshot: str) -> LoadedSnapshot:
        models = await asyncio.to_thread(self._reader.read, snapshot)
        if not snapshot:
            return LoadedSnapshot(self._loop, self._loop.ask, models.scoring, _nothing)
        files = await asyncio.to_thread(self._files, snapshot)
        name = await self._thread.run(self._slots.add, files)

        def ask(request: GenerationRequest) -> Answer:
            self._slots.use(request, name)
            try:
                answer = self._loop.ask(request)
            except ValueError:
                self._slots.forget(request)
                raise
            answer.add_done_callback(lambda _: self._slots.forget(request))
            return answer

        async def close() -> None:
            await self._thread.run(self._slots.remove, name)

        return LoadedSnapshot(self._loop, ask, models.scoring, close)

    def _files(self, snapshot: str) -> dict[str, bytes]:
        stored = read_state(Path(snapshot))
        layout = AdapterLayout.of(self._reader.base, stored.spec)
        return peft_files(stored, layout, "", self._config.serve.lora_alpha)


async def _serve(loop: EngineLoop, failed: Failed) -> None:
    try:
        await loop.serve()
    except Exception as error:  # supervision boundary: no caller may wait for a dead engine
        failed(error)
        raise


async def _nothing() -> None:
    """Free nothing: the policy stays loaded."""

"""The models that a generator samples from: the policy, and snapshots of clients' models.

A snapshot with adapters shares the policy's weights; one of all weights has its own.
Each has an embedded engine; or one vLLM samples from all of them, and computes each one's adapters
with the policy that it loaded once. `scored` gives log-probs of a given sequence.

Axes: T tokens, V vocabulary, K ids at one position.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.engines.loop import EngineLoop, EngineThread
from composer_mesh.actors.engines.vllm_weights import AdapterSlots
from composer_mesh.actors.models.language_model import decoder_states, logit_softcap
from composer_mesh.configs.schema import Config
from composer_mesh.losses.blocks import default_block, softcapped
from composer_mesh.plugins.tinker.models.messages import ScoreRequest, Scores
from composer_mesh.plugins.tinker.models.model_state import StoredState, UnusableState, read_state
from composer_mesh.plugins.tinker.models.trained_weights import (
    AdapterLayout,
    adapted,
    peft_files,
    shared_copy,
)
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult


@dataclass(frozen=True)
class SnapshotModels:
    """Two copies of one snapshot's model that share its weights: to sample with, and to score."""

    sampling: Any
    scoring: Any


class SnapshotReader:
    """Makes the models of snapshots from their files; the empty path is the policy itself."""

    def __init__(self, base: Any, alpha: float) -> None:
        self.base, self._alpha = base.requires_grad_(False), alpha

    def read(self, path: str) -> SnapshotModels:
        """Return a snapshot's models; raises `UnusableState`."""
        if not path:
            return SnapshotModels(shared_copy(self.base), shared_copy(self.base))
        stored = read_state(Path(path))
        if stored.spec.rank == 0:
            model = self._whole(path, stored)
            return SnapshotModels(model, shared_copy(model))
        return SnapshotModels(self._adapted(path, stored), self._adapted(path, stored))

    def _adapted(self, path: str, stored: StoredState) -> Any:
        layout = AdapterLayout.of(self.base, stored.spec)
        weights = next(self.base.parameters())
        flat = stored.tensors["weights"].to(weights.device, weights.dtype)
        if flat.shape != (layout.total,):
            raise UnusableState(path, "it is of another base model")
        model, active = adapted(self.base)
        active.use(layout.pairs(flat[None]), layout.rank, self._alpha)
        return model

    @torch.no_grad()
    def _whole(self, path: str, stored: StoredState) -> Any:
        model = copy.deepcopy(self.base)
        weights = list(model.parameters())
        flat = stored.tensors["weights"]
        if len(flat) != sum(one.numel() for one in weights):
            raise UnusableState(path, "it is of another base model")
        for one, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            one.copy_(part.view_as(one))
        return model


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


class EmbeddedEngines:
    """An embedded engine for each snapshot, whose models share the policy's weights."""

    def __init__(self, config: Config, reader: SnapshotReader, failed: Failed) -> None:
        """`failed` receives the error that ends an engine."""
        self._config, self._reader, self._failed = config, reader, failed

    async def open(self, snapshot: str) -> LoadedSnapshot:
        """Load a snapshot by its file; the empty path is the policy. Raises `UnusableState`."""
        models = await asyncio.to_thread(self._reader.read, snapshot)
        thread, config = EngineThread(), self._config
        engine = await thread.run(
            EmbeddedEngine,
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
    ) -> VllmEngines:
        """Start vLLM with the policy of `folder`; `failed` receives the error that ends it."""
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


@torch.inference_mode()
def scored(model: Any, ids: list[int], request: ScoreRequest) -> Scores:
    """Return the log-probs of tokens 1 to T - 1; empty arrays for a sequence of one token.

    Raises ValueError where they are not finite. Scores of a block of positions are freed before
    those of the next are computed.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor(ids, device=device)
    states = decoder_states(model, input_ids=tokens[None])[0, :-1]
    vocabulary = int(model.config.get_text_config().vocab_size)
    block = max(1, default_block(states) // vocabulary)
    targets = None if request.targets is None else torch.from_numpy(request.targets).to(device)
    parts = [
        _block(
            model,
            states[n : n + block],
            tokens[n + 1 : n + 1 + block],
            request.top_k,
            None if targets is None else targets[n : n + block],
        )
        for n in range(0, max(1, len(states)), block)
    ]
    own, top_ids, top, wanted = (
        None if column[0] is None else torch.cat(column).cpu().numpy()
        for column in zip(*parts, strict=True)
    )
    assert own is not None
    if np.isnan(own).any():
        raise ValueError("logits are not finite: score with weights that have not diverged")
    ints = None if top_ids is None else top_ids.astype(np.int32)
    return Scores(own, ints, top, wanted)


def _block(
    model: Any, states: Tensor, own: Tensor, top_k: int, targets: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    head = model.get_output_embeddings()
    logprobs = softcapped(head(states[None])[0].float(), logit_softcap(model.config)).log_softmax(
        -1
    )
    chosen = logprobs.gather(-1, own[:, None])[:, 0]
    top, top_ids = logprobs.topk(min(top_k, logprobs.shape[-1])) if top_k else (None, None)
    if targets is None:
        return chosen, top_ids, top, None
    found = logprobs.gather(-1, targets.clamp(min=0))
    return chosen, top_ids, top, found.masked_fill(targets < 0, 0.0)

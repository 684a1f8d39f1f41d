"""An actor that serves requests with an engine and takes new weights every few steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from monarch.actor import concurrent_endpoint
from torch import Tensor

from composer_mesh.actors.engines.loop import EngineThread
from composer_mesh.actors.engines.port import make_engine
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult

State = dict[str, Tensor]


@dataclass(frozen=True)
class Stated:
    """A version of the weights as a state dict, each tensor with one name."""

    version: int
    state: State

    def apply(self, model: torch.nn.Module, rate: float = 1.0) -> None:
        assert rate == 1.0
        model.load_state_dict(self.state)

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for name, tensor in self.state.items():
            yield (name,), tensor


class EngineProbe(MeshActor):
    """One engine, stepped by the test's plan."""

    kind = "probe"

    def __init__(self) -> None:
        self._thread = EngineThread()

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        self._engine = await self._thread.run(make_engine, config, folder)

    @concurrent_endpoint
    async def serve(
        self, requests: list[GenerationRequest], states: list[State], every: int
    ) -> list[GenerationResult]:
        """Serve all; after each `every` steps with requests under way comes the next state."""
        return await self._thread.run(self._serve, requests, states, every)

    def _serve(
        self, requests: list[GenerationRequest], states: list[State], every: int
    ) -> list[GenerationResult]:
        engine, waiting, steps = self._engine, list(requests), 0
        coming = iter(enumerate(states, engine.version + 1))
        results: list[GenerationResult] = []
        while waiting or engine.busy:
            # Some wait in the engine, more than run at once, and some come between updates.
            while waiting and engine.outstanding < 40:
                engine.submit(waiting.pop(0), results.append)
            engine.step()
            steps += 1
            if steps % every == 0 and (new := next(coming, None)) is not None:
                engine.swap(Stated(*new))
        assert next(coming, None) is None, f"{steps} steps leave no room for all updates"
        return results

    async def __cleanup__(self, _: Exception | None) -> None:
        await self._thread.run(self._engine.close)

"""The actor that trains clients' models for `composer-mesh serve`.

What it holds is lost with it: its server opens the models again and repeats their operations.
"""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.mcp_servers.servers import serving
from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import load_model
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.actors.served_models.client_trainer import ClientTrainer
from composer_mesh.actors.served_models.messages import ModelSpec, TrainCall, TrainResult
from composer_mesh.actors.served_models.trained_weights import AdapterWeights, FullWeights
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.device import own_device
from composer_mesh.tasks.loading import make_task


class ServedTrainerActor(MeshActor):
    """One process with the frozen policy and the models of clients.

    server -- calls of clients --> ServedTrainerActor -- results; states to files --> server
    """

    kind: ClassVar[str] = "served_trainer"

    def __init__(self) -> None:
        self._order = asyncio.Lock()
        self._trainer: ClientTrainer | None = None

    @concurrent_endpoint
    async def prepare(self, config: Config) -> Path:
        """Make or find the policy that clients train; return its folder. Waits for a warm start."""

        def report(step: int, loss: float) -> None:
            total = config.policy.warm_start.steps
            self.activity = f"warm start {step + 1}/{total}, loss {loss:.2f}"

        def work() -> Path:
            if config.policy.path is not None:
                return config.policy.path
            return prepare_policy(config, make_task(config), report, serving)

        folder = await asyncio.to_thread(work)
        self.activity = "idle"
        return folder

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> int:
        """Load the policy; return the size of its vocabulary. No client's model is open then."""
        self._trainer = await asyncio.to_thread(_make, config, folder)
        return self._trainer.vocabulary

    @concurrent_endpoint
    async def open(self, model: str, spec: ModelSpec, path: Path | None) -> int:
        """Take a model in, from its file where it has one; return its position.

        Waits for calls under way, as the other endpoints do.
        """
        async with self._order:
            return await asyncio.to_thread(self._loaded().open, model, spec, path)

    @concurrent_endpoint
    async def close(self, models: list[str]) -> None:
        """Forget models, whose states were saved."""
        async with self._order:
            for model in models:
                self._loaded().close(model)

    @concurrent_endpoint
    async def execute(self, calls: list[TrainCall]) -> list[TrainResult]:
        """Execute calls and return their results in order, as `ClientTrainer.execute` does.

        Raises `ModelNotOpen`, and then nothing was executed.
        """
        async with self._order:
            self.activity = f"executing {len(calls)} operations"
            try:
                return await asyncio.to_thread(self._loaded().execute, calls)
            finally:
                self.activity = "idle"

    @concurrent_endpoint
    async def save(self, model: str, path: Path) -> int:
        """Write a model's whole state to a file; return its bytes."""
        async with self._order:
            return await asyncio.to_thread(self._loaded().save, model, path)

    def details(self) -> dict[str, Any]:
        return {"models": 0 if self._trainer is None else len(self._trainer.models)}

    def _loaded(self) -> ClientTrainer:
        if self._trainer is None:
            raise RuntimeError("the trainer has no policy: call load first")
        return self._trainer


def _make(config: Config, folder: Path) -> ClientTrainer:
    base = load_model(folder).to(own_device())
    LanguageModel(base).check_head()
    serve = config.serve
    weights = FullWeights(base) if serve.full_weights else AdapterWeights(base, serve.lora_alpha)
    return ClientTrainer(base, weights, config.trainer.microbatch_tokens, serve.batched_models)

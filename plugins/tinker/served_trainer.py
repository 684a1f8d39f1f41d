"""The actor that trains clients' models for `composer-mesh serve`.

What it holds is lost with it: its server opens the models again and repeats their operations. Of
several ranks each holds all models, gets all calls in one order, and its rows of the policy.
"""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.models.rank_actor import RankActor
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.device import own_device
from composer_mesh.mesh.task_resources import serving
from composer_mesh.plugins.tinker.models.client_trainer import ClientTrainer, make_trainer
from composer_mesh.plugins.tinker.models.messages import ModelSpec, TrainCall, TrainResult
from composer_mesh.tasks.loading import make_task


class ServedTrainerActor(RankActor):
    """One rank with the frozen policy, or its rows of it, and the models of clients.

    server -- calls of clients --> ServedTrainerActor -- results; states to files --> server
    """

    kind: ClassVar[str] = "served_trainer"

    def __init__(self) -> None:
        super().__init__()
        self._order = asyncio.Lock()
        self._trainer: ClientTrainer | None = None

    @concurrent_endpoint
    async def prepare(self, config: Config) -> Path:
        """Make or find the policy that clients train; return its folder. Waits for a warm start."""

        def report(text: str) -> None:
            self.activity = f"warm start: {text}"

        def work() -> Path:
            if config.policy.folder is not None:
                return config.policy.folder
            return prepare_policy(config, make_task(config), report, serving)

        folder = await asyncio.to_thread(work)
        self.activity = "idle"
        return folder

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> int:
        """Load the policy; return the size of its vocabulary. No client's model is open then.

        Several ranks are connected before, and load it together.
        """
        if self._ranks.size == 1:
            self._ranks = Ranks(device=own_device())
        self._trainer = await asyncio.to_thread(make_trainer, config, folder, self._ranks)
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

        The results of all ranks are equal, and the first one's are returned alone. Raises
        `ModelNotOpen`, and then nothing was executed.
        """
        async with self._order:
            self.activity = f"executing {len(calls)} operations"
            try:
                found = await asyncio.to_thread(self._loaded().execute, calls)
            finally:
                self.activity = "idle"
            return found if self._ranks.rank == 0 else []

    @concurrent_endpoint
    async def save(self, model: str, path: Path) -> int:
        """Write a model's whole state to a file, on the first rank; return its bytes there."""
        async with self._order:
            return await asyncio.to_thread(self._loaded().save, model, path)

    def details(self) -> dict[str, Any]:
        return {"models": 0 if self._trainer is None else len(self._trainer.models)}

    def _loaded(self) -> ClientTrainer:
        if self._trainer is None:
            raise RuntimeError("the trainer has no policy: call load first")
        return self._trainer

"""The trainer actor: owns the weights that learn, steps them, and publishes each version.

Losses are in `train_step`; who gets a version and when is the controller's decision.
"""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.actors.language_model import LanguageModel
from composer_mesh.actors.policy import load_model, load_tokenizer, save_policy
from composer_mesh.actors.signals import SignalHandle
from composer_mesh.actors.train_step import ThreeChannelStep, needs_reference
from composer_mesh.actors.warm_start import prepare_policy
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.transport import read
from composer_mesh.mesh.weights import WeightPublisher, WeightsHandle
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.tasks import make_task


class WrongVersion(RuntimeError):
    """A teacher signal was made with other weights than the ones it shall train."""

    def __init__(self, signal: int, trainer: int) -> None:
        super().__init__(signal, trainer)

    def __str__(self) -> str:
        return (
            f"the SDPO signal is of version {self.args[0]} but the trainer is at {self.args[1]}: "
            "let the teacher pull before it is asked"
        )


class TrainerActor(MeshActor):
    """One process with the model, its optimizer and, where a loss needs one, a frozen reference.

    controller -- StepBatch, SignalHandle --> TrainerActor -- WeightsHandle --> controller
    """

    kind: ClassVar[str] = "trainer"

    def __init__(self) -> None:
        self._order = asyncio.Lock()

    @concurrent_endpoint
    async def prepare(self, config: Config) -> Path:
        """Make or find the initial policy; returns its folder. Waits for the warm start."""

        def report(step: int, loss: float) -> None:
            total = config.policy.warm_start.steps
            self.activity = f"warm start {step + 1}/{total}, loss {loss:.2f}"

        def work() -> Path:
            return prepare_policy(config, make_task(config), report)

        self.activity = "preparing the policy"
        folder = await asyncio.to_thread(work)
        self.activity = "idle"
        return folder

    @concurrent_endpoint
    async def load(self, config: Config, folder: Path) -> None:
        """Load the policy as version 0 and make the optimizer."""
        self._tokenizer = load_tokenizer(folder)
        self._model: Any = load_model(folder)
        LanguageModel(self._model).check_head()
        frozen = needs_reference(config)
        reference = load_model(folder).requires_grad_(False) if frozen else None
        self._step = ThreeChannelStep(self._model, reference, config)
        self._publisher = WeightPublisher(self._model)
        self.policy_version = 0

    @concurrent_endpoint
    async def train(self, batch: StepBatch, signal: SignalHandle | None) -> dict[str, Any]:
        """One optimizer step: version v becomes v + 1. Waits for the signal's bytes and the step.

        Steps run one at a time, in the order of the calls.
        """
        async with self._order:
            assert self.policy_version is not None
            if signal is not None and signal.version != self.policy_version:
                raise WrongVersion(signal.version, self.policy_version)
            self.activity = f"training step {batch.step + 1}"
            states = None if signal is None else await read(signal.buffer)
            metrics = await asyncio.to_thread(self._step.run, batch, states)
            self.policy_version += 1
            self.activity = "idle"
            return metrics

    @concurrent_endpoint
    async def publish(self) -> WeightsHandle:
        """Offer the current version. The buffer of the version before stays readable."""
        async with self._order:
            assert self.policy_version is not None
            return await self._publisher.publish(self.policy_version)

    @concurrent_endpoint
    async def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face format."""
        async with self._order:
            await asyncio.to_thread(save_policy, self._model, self._tokenizer, folder)

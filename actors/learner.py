"""One rank of the trainer without messages: a model, its step, the teacher beside it, checkpoints.

Ranks call each method together. Which batch comes when, whose signals teach it and who gets the
weights is not known here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.checkpoint import TrainingState, restore_weights
from composer_mesh.actors.checkpoint_folder import whole
from composer_mesh.actors.export import export_state
from composer_mesh.actors.lora import adapter_weights, restore_adapters
from composer_mesh.actors.policy import load_tokenizer, save_policy
from composer_mesh.actors.ranks import Ranks
from composer_mesh.actors.rows import gathered
from composer_mesh.actors.sources import InlineSource
from composer_mesh.actors.teaching import TeacherModel, blend_from
from composer_mesh.actors.train_sdpo import SignalSource
from composer_mesh.actors.train_step import ThreeChannelStep, needs_reference
from composer_mesh.actors.trained_model import frozen_model, trained_model
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.batches import StepBatch


class Learner:
    """Begins as the policy of a folder, which is version 0; each step makes the next version."""

    def __init__(self, config: Config, folder: Path, ranks: Ranks) -> None:
        self.version = 0
        self._config, self._ranks = config, ranks
        self._tokenizer = load_tokenizer(folder)
        self.model = trained_model(config, folder, ranks)
        reference = frozen_model(config, folder, ranks) if needs_reference(config) else None
        self.step = ThreeChannelStep(self.model, reference, config, ranks)
        self._teacher: TeacherModel | None = None
        if config.sdpo.on and config.sdpo.placement == "inline":
            self._teacher = TeacherModel(
                self.model,
                config.sdpo,
                config.trainer.microbatch_tokens,
                follows=True,
                copied=lambda _: frozen_model(config, folder, ranks),
            )

    @property
    def teaches_itself(self) -> bool:
        """Whether the SDPO teacher is in this process."""
        return self._teacher is not None

    def own_signals(self, batch: StepBatch) -> InlineSource:
        """The signals of the teacher in this process for the views of a batch."""
        assert self._teacher is not None
        forwards = self.step.rounds(batch).teacher
        return InlineSource(self._teacher, self._config.sdpo, self.version, forwards)

    def train(
        self,
        batch: StepBatch,
        source: SignalSource | None,
        before_update: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """One optimizer step; returns its metrics. The rest is `ThreeChannelStep.run`'s."""
        metrics = self.step.run(batch, source, before_update)
        self.version += 1
        if self._teacher is not None:
            self._teacher.absorb(self.version, blend_from(self.model))
        return metrics

    def export(self) -> dict[str, Tensor]:
        """The policy's tensors as `export_state` gives them; may be called beside a step."""
        return export_state(self.model)

    def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face format and the state of its training.

        All ranks gather and the first one writes. The folder appears when all of it is on disk.
        """
        writes = self._ranks.rank == 0
        rng = self._ranks.gather(torch.get_rng_state())
        weights = gathered(self.export(), writes)
        adapters = gathered(adapter_weights(self.model), writes)
        average = {} if self._teacher is None else gathered(self._teacher.average(), writes)
        step = self.step.state()
        if writes:
            with whole(folder) as draft:
                save_policy(self.model, self._tokenizer, draft, weights)
                TrainingState(self.version, step, average, rng, adapters).save(draft)

    def restore(self, checkpoint: Path) -> None:
        """Go on from what any number of ranks has saved of a run that began as this one did."""
        state = TrainingState.load(checkpoint)
        if self._config.trainer.lora is None:
            restore_weights(self.model, checkpoint, self._ranks)
        else:
            restore_adapters(self.model, state.adapters)
        self.step.restore(state.step)
        if self._teacher is not None:
            self._teacher.restore(state.version, state.teacher)
        if self._ranks.rank < len(state.rng):
            torch.set_rng_state(state.rng[self._ranks.rank])
        self.version = state.version

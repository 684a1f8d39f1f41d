"""One trainer rank without messaging: model, optimizer step, inline teacher and checkpoints.

Every method is collective: all ranks call it together.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from composer_mesh.actors.checkpoints.manifest import WrittenFile
from composer_mesh.actors.checkpoints.state import (
    ADAPTERS,
    ISLAND,
    OPTIMIZER,
    TEACHER,
    WEIGHTS,
    CheckpointReader,
    CheckpointWriter,
    TrainingState,
    random_states,
    reading,
    restore_random_states,
)
from composer_mesh.actors.learning.running_call import RunningCall
from composer_mesh.actors.learning.step import OptimizerStep
from composer_mesh.actors.learning.update_pass import TeacherOutputSource
from composer_mesh.actors.models.backend import make_backend
from composer_mesh.actors.models.device_memory import DeviceMemory
from composer_mesh.actors.models.lora import AdapterFolder, restore_adapters
from composer_mesh.actors.models.optimizer_state import StoredOptimizerState, check_weights
from composer_mesh.actors.models.policy import ModelFolder
from composer_mesh.actors.models.ranks import Division, Ranks
from composer_mesh.actors.models.sharding import distinct, own_weights, release, stored_weights
from composer_mesh.actors.models.trained_model import frozen_model
from composer_mesh.actors.teacher_outputs.sources import InlineSource
from composer_mesh.actors.teacher_outputs.teaching import (
    TeacherModel,
    blend_from,
    check_teacher_tokenizer,
    teacher_vocabulary,
)
from composer_mesh.configs import plugins
from composer_mesh.configs.hub import id_of
from composer_mesh.configs.paths import TEACHER_KEY
from composer_mesh.configs.schema import Config
from composer_mesh.planning.model_folder import UnfitModelFolder
from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.traces import TurnDivergences


class StepHook(Protocol):
    """What else happens at a step: made with the config, the trained weights and the ranks.

    Every method but `new_events` is collective over the ranks.
    """

    def join(self) -> None:
        """Begin before the first step."""

    def restore(self, step: int, kept: StoredOptimizerState) -> None:
        """Continue after the checkpoint of a step, with what it has `kept`."""

    def after_step(self, step: int) -> Mapping[str, float]:
        """Read and change the weights after a step; return figures for its metrics."""

    def kept(self) -> Mapping[str, Tensor]:
        """Return what a checkpoint keeps for `restore`."""

    def new_events(self) -> list[tuple[str, str]]:
        """Return the events since the last call: kind and text."""


class Learner:
    """Trains from the policy of a folder, which is version 0; each step makes the next version."""

    def __init__(
        self, config: Config, folder: Path, ranks: Ranks, custom: RunningCall | None = None
    ) -> None:
        self.version = 0
        self._config, self._ranks = config, ranks
        trainer = config.trainer
        ranks.check_divided(Division(trainer.context_parallel, trainer.expert_parallel))
        self._backend = make_backend(config, ranks)
        self.model = self._backend.model(folder)
        reference = None
        if config.loss.needs_reference:
            reference = self._initial(folder, config.trainer.frozen_dtype)
        self._memory, self._reference = DeviceMemory(ranks.device), reference
        optimizers = self._backend.optimizers
        self.step = OptimizerStep(self.model, reference, config, ranks, custom, optimizers)
        export = ModelFolder(folder) if ranks.rank == 0 else None
        self._writer = CheckpointWriter(
            ranks, None if export is None else export.write, _adapter_export(config)
        )
        self._island: StepHook | None = None
        if config.islands.on:
            self._island = plugins.load("step_hooks", "islands")(config, self.step.weights, ranks)
        self._teacher: TeacherModel | None = None
        if config.sdpo.on and config.sdpo.placement == "inline":
            self._teacher = self._inline_teacher(folder)

    def _initial(self, folder: Path, dtype: str) -> Any:
        """Return the initial policy: the trained model itself where only adapters are trained."""
        if self._config.trainer.shares_base:
            return self.model
        return frozen_model(self._config, folder, self._ranks, dtype)

    def _inline_teacher(self, folder: Path) -> TeacherModel:
        config = self._config
        check_teacher_tokenizer(config.sdpo, folder)
        return TeacherModel(
            self.model,
            config.sdpo,
            config.trainer.microbatch_tokens,
            follows=True,
            copied=lambda _: self._frozen_teacher(folder),
            vocabulary=teacher_vocabulary(config.sdpo, folder),
            sharing=config.trainer.sharing,
        )

    def _frozen_teacher(self, folder: Path) -> Any:
        """Return the teacher's initial weights as a model of their own, placed like the trained."""
        config, other = self._config, self._config.sdpo.teacher_model
        if config.sdpo.keeps_initial:
            return self._initial(folder, config.teacher_dtype)
        path = folder if other is None else other.folder
        try:
            return frozen_model(config, path, self._ranks, config.teacher_dtype)
        except UnfitModelFolder as error:
            raise error if other is None else error.at(TEACHER_KEY) from error

    @property
    def teaches_itself(self) -> bool:
        """Whether the SDPO teacher runs in this process."""
        return self._teacher is not None

    @property
    def divergences(self) -> list[TurnDivergences]:
        """Divergences of student and teacher in the last step's hinted turns on this rank."""
        return self.step.divergences

    def own_teacher_outputs(self, batch: StepBatch) -> InlineSource:
        """Return a source that computes the teacher outputs of a batch in this process."""
        assert self._teacher is not None
        forwards = self.step.teacher_forwards(batch)
        return InlineSource(self._teacher, self._config.sdpo, self.version, forwards)

    def train(
        self,
        batch: StepBatch,
        source: TeacherOutputSource | None,
        before_update: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Run one optimizer step and return its metrics; arguments as in `OptimizerStep.run`.

        Raises ValueError for a batch of another version, such as one that was trained already.
        """
        self._memory.check("a step")
        batch.check_trains(self.version)
        metrics = self.step.run(batch, source, before_update)
        if self._island is not None:
            metrics |= self._island.after_step(self.version + 1)
        self.version += 1
        if self._teacher is not None:
            self._teacher.absorb(self.version, blend_from(self.model))
        return metrics

    def set_awake(self, awake: bool) -> None:
        """Give up this rank's device memory for that of the host, or take it back, bit for bit.

        Gradients are cleared. Nothing can be trained, copied or published in between.
        """
        if awake:
            self._memory.restore()
        elif not self._memory.released:
            self._sleep()

    def _sleep(self) -> None:
        teachers = [] if self._teacher is None else self._teacher.models
        if self._teacher is not None:
            self._teacher.release()
        others = {id(one): one for one in (self._reference, *teachers) if one is not None}
        others.pop(id(self.model), None)
        average = teachers[0] if self._config.sdpo.teacher == "ema" and teachers else None
        changing, constant = self.step.device_state(), list[Tensor]()
        for model in (self.model, *others.values()):
            release(model)
            for one in stored_weights(model).values():
                frozen = isinstance(one, nn.Parameter) and not one.requires_grad
                (constant if frozen and model is not average else changing).append(one)
        self._memory.release(changing, constant)

    def join_islands(self) -> None:
        """Start from the common weights, if this run is an island."""
        if self._island is not None:
            self._island.join()

    def new_events(self) -> list[tuple[str, str]]:
        """Return the events of this island's rounds since the last call: kind and text."""
        return [] if self._island is None else self._island.new_events()

    def export(self) -> dict[str, Tensor]:
        """Return the policy's tensors as generators load them; may run concurrently with a step."""
        self._memory.check("a copy of the weights")
        return self._backend.published(self.model)

    def published(self) -> dict[str, Tensor]:
        """Return what generators load at each version: the policy's tensors, or adapters alone."""
        self._memory.check("a copy of the weights")
        if not self._config.syncs_adapters:
            return self.export()
        adapters = self._backend.adapters(self.model)
        return {name: weights.detach() for name, weights in adapters.items()}

    def copy(self, export: bool = True) -> None:
        """Copy the training state for a checkpoint; without `export`, only what a resume needs.

        Collective over all ranks. Training may continue when this returns.
        """
        self._memory.check("a copy of the state")
        tensors: dict[str, Tensor] = {}
        adapters = self._backend.adapters(self.model)
        if export or not adapters:
            _add(tensors, WEIGHTS, self.export())
        _add(tensors, ADAPTERS, adapters)
        if self._teacher is not None:
            _add(tensors, TEACHER, self._teacher.average())
        _add(tensors, OPTIMIZER, self.step.optimizer_state())
        if self._island is not None:
            _add(tensors, ISLAND, self._island.kept())
        rng = self._ranks.gather(random_states(self._ranks.device))
        self._writer.copy(TrainingState(self.version, tensors, self.step.figures(), rng))

    def write(self, folder: Path, export: bool = True) -> list[WrittenFile]:
        """Write the copied state, from any thread, as `CheckpointWriter.write` does."""
        return self._writer.write(folder, export)

    def restore(self, checkpoint: Path) -> None:
        """Restore the state of a checkpoint of the same run, written by any number of ranks.

        Raises `UnreadableCheckpoint`, and for another policy's checkpoint `StateOfOtherWeights` or
        `OtherAdapters`.
        """
        found = CheckpointReader(checkpoint)
        adapters = self._backend.adapters(self.model)
        if not adapters:
            weights = distinct(own_weights(self.model))
            kept = found.of(WEIGHTS)
            check_weights(weights, kept.shapes())
            kept.read(weights)
        else:
            restore_adapters(adapters, found.of(ADAPTERS))
        with reading(checkpoint):
            self.step.restore(found.figures, found.of(OPTIMIZER))
        if self._teacher is not None:
            self._teacher.restore(found.version, found.of(TEACHER))
        if self._ranks.rank < len(found.rng):
            with reading(checkpoint):
                restore_random_states(found.rng[self._ranks.rank], self._ranks.device)
        if self._island is not None:
            self._island.restore(found.version, found.of(ISLAND))
        self.version = found.version


def _adapter_export(config: Config) -> Callable[[Path, dict[str, Tensor]], None] | None:
    """Return what writes the adapters of the default backend, None without any."""
    lora = config.trainer.lora
    if lora is None or config.trainer.backend is not None:
        return None
    named = id_of(config.policy.path)
    if named is not None and not named.part:
        return AdapterFolder(lora, named.repo, named.revision).write
    base = "" if config.policy.folder is None else str(config.policy.folder)
    return AdapterFolder(lora, base).write


def _add(tensors: dict[str, Tensor], kind: str, more: Mapping[str, Tensor]) -> None:
    tensors.update({kind + name: tensor for name, tensor in distinct(more).items()})

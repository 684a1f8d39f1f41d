"""`MeshRollouts`: the mesh as `rollout_worker` and `weight_transfer` of TRL's AsyncGRPOTrainer.

    mesh = MeshRollouts(config, args)
    AsyncGRPOTrainer(mesh.model, args=args, ..., rollout_worker=mesh, weight_transfer=mesh)

Episodes are those of the config's task, played by our rollout workers on our generators; TRL trains
them. Everything here runs in the thread of the trainer. Needs the extra `trl`.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from composer_mesh.actors.models.policy import empty_model
from composer_mesh.actors.models.warm_start import prepare_policy
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import prepare_environment
from composer_mesh.mesh.task_resources import serving
from composer_mesh.plugins.frameworks.trl.async_stream import RolloutBuffer
from composer_mesh.plugins.frameworks.trl.checks import check_async_grpo, rollouts_at_once
from composer_mesh.services.checks.accepting import accept, listed, startable
from composer_mesh.tasks.loading import make_task

if TYPE_CHECKING:
    from composer_mesh.plugins.frameworks.trl.async_run import MeshThread

MOST_FIGURES = 4096


class MeshRollouts:
    """Plays rollouts for TRL's AsyncGRPOTrainer, and takes its weights; both of its protocols.

    `args` are the trainer's own. Processes start at the first `send_weights`, on the main process
    alone, and end with `stop` or `destroy`. Raises ConfigError, UsageError or ValueError where
    config and `args` do not fit.
    """

    def __init__(self, config: Config, args: Any) -> None:
        check_async_grpo(config, args)
        self._most = rollouts_at_once(args)
        self._config = listed(config)
        accept(self._config)
        startable(self._config)
        self._output = Path(args.output_dir)
        self._mesh: MeshThread | None = None
        self._names: WeightNames | None = None
        self._sent = 0
        self._started = self._ended = False
        self.rollout_buffer = RolloutBuffer(args.max_staleness, self._taken)
        self.metrics_queue: queue.Queue[Any] = queue.Queue(MOST_FIGURES)

    @cached_property
    def model(self) -> str:
        """The folder of the initial policy. Waits for a warm start if none is cached."""
        task = make_task(self._config)
        return str(prepare_policy(self._config, task, serving=serving))

    # Weights

    def init_weight_transfer(self) -> None:
        """Read which weights the generators take."""
        if self._ended:
            raise RuntimeError("this mesh has ended: make a new MeshRollouts for another training")
        self._names = WeightNames.of(Path(self.model))

    def pause(self) -> None:
        """Let no group enter until `resume`; rollouts continue with the weights they have."""
        if self._mesh is not None:
            self._mesh.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Have all generators serve these weights, as the next version. Waits for it.

        The first call also starts the mesh, once it has seen that all weights fit.
        """
        if self._names is None:
            raise RuntimeError("init_weight_transfer comes before the first send_weights: call it")
        state = self._names.taken_from(iterator)
        if self._mesh is None:
            self._mesh = self._start()
        self._mesh.send(state, self._sent + 1)
        self._sent += 1

    def resume(self) -> None:
        """Let groups enter again."""
        if self._started:
            self._alive().open()

    def destroy(self) -> None:
        """End all processes. Waits for it."""
        self.stop()

    # Rollouts

    def start(self) -> None:
        """Begin to play rollouts; needs weights."""
        self._alive().open()
        self._started = True

    def update_model_version(self, model_version: int) -> None:
        """Set the version that the trainer trains: samples that are too old for it are dropped."""
        if model_version != self._sent:
            raise RuntimeError(
                f"the trainer is at version {model_version} but {self._sent} were sent: pass the "
                "same MeshRollouts as rollout_worker and weight_transfer, new for each training"
            )
        self.rollout_buffer.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise MeshFailed where the mesh has ended, or no rollouts were finished for so long."""
        self._alive().check(stale_after_s)

    def stop(self) -> None:
        """End all processes. Waits for it; raises MeshFailed for a failure not raised before."""
        self._ended = True
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def _taken(self) -> None:
        if self._mesh is not None:
            self._mesh.taken()

    def _alive(self) -> MeshThread:
        if self._mesh is None:
            raise RuntimeError(
                "the mesh does not run: AsyncGRPOTrainer starts it when weight_transfer is this "
                "MeshRollouts too, once for one training"
            )
        return self._mesh

    def _start(self) -> MeshThread:
        prepare_environment()  # Monarch reads it when it is imported
        from composer_mesh.plugins.frameworks.trl.async_run import MeshThread
        from composer_mesh.plugins.frameworks.trl.async_stream import FOLDER, SampleQueues

        policy = self._config.policy.model_copy(update={"path": Path(self.model), "sizes": None})
        config = self._config.model_copy(update={"policy": policy})
        queues = SampleQueues(self.rollout_buffer, self.metrics_queue, self._most)
        mesh = MeshThread(config, self._output / FOLDER, queues)
        try:
            mesh.wait_until_ready()
        except BaseException:
            mesh.close()
            raise
        return mesh


class WeightNames:
    """The weights that generators take: their shapes, and further names of the same weights."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], further: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._shapes, self._further = shapes, further

    @classmethod
    def of(cls, folder: Path) -> WeightNames:
        """Read them from the folder of a model, without its weights."""
        model = empty_model(folder)
        model.tie_weights()
        names: dict[int, list[str]] = {}
        for name, weights in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(weights), []).append(name)
        shapes = {name: tuple(weights.shape) for name, weights in model.named_parameters()}
        if buffers := sorted(
            model.state_dict().keys() - {n for own in names.values() for n in own}
        ):
            raise ValueError(
                f"{folder} has weights that are not parameters, such as {buffers[0]}, and "
                "AsyncGRPOTrainer sends parameters alone: train another model"
            )
        return cls(shapes, {own[0]: tuple(own[1:]) for own in names.values()})

    def taken_from(self, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of a stream by all their names, in this machine's main memory.

        Raises ValueError where they are not those of the model. The iterator may be collective, so
        it is consumed in the caller's thread, one tensor of an accelerator at a time.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in stream:
            self._check(name, tensor)
            kept = tensor.detach().to("cpu")
            found |= dict.fromkeys((name, *self._further[name]), kept)
        if missing := [name for name in self._shapes if name not in found]:
            raise ValueError(
                f"the trainer sends no {missing[0]} (of {len(missing)} that are missing), and "
                "generators take all weights: train all parameters, or adapters that TRL merges"
            )
        return found

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._shapes.get(name)
        if shape is None:
            raise ValueError(
                f"the trainer sends {name}, which the generators' model does not have, unlike "
                f"{next(iter(self._shapes))}: give AsyncGRPOTrainer `mesh.model` as its model"
            )
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"the trainer sends {name} as {tuple(tensor.shape)} but the generators' model has "
                f"{shape}: give AsyncGRPOTrainer `mesh.model` as its model"
            )

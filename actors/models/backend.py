"""The port of the trainer to what it trains: the model of a folder, its optimizers, its exports.

The trainer owns the rest: losses, microbatches, gradient sums over ranks, clipping, the learning
rate, publishing and checkpoint files. `TorchBackend` is what a run uses by default; a backend of
the user's own, `trainer.backend`, implements the same port, or derives from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from composer_mesh.actors.models.adapter_files import export_state
from composer_mesh.actors.models.lora import adapter_weights
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharded_muon import ADJUST, ShardedMuon
from composer_mesh.actors.models.sharding import is_dtensor, local
from composer_mesh.actors.models.trained_model import trained_model
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.planning.optimizer_memory import is_layer_matrix, parts_of

_MakeOptimizer = Callable[[TrainerConfig, Mapping[str, nn.Parameter]], torch.optim.Optimizer]
Optimizers = Callable[[Mapping[str, nn.Parameter]], Sequence[torch.optim.Optimizer]]
"""Makes the optimizers of the trainable weights, which have their names."""


@dataclass(frozen=True)
class BackendContext:
    """What a backend is made from: the run's config, and this rank among the trainer's ranks."""

    config: Config
    ranks: Ranks

    @property
    def trainer(self) -> TrainerConfig:
        """The section [trainer] of the config."""
        return self.config.trainer

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.ranks.device


@runtime_checkable
class TrainerBackend(Protocol):
    """What one rank trains. Made as `Backend(context, **kwargs)`; all ranks make the same calls."""

    def model(self, folder: Path) -> Any:
        """Load a folder's model on the rank's device.

        A causal LM of transformers, or a module with its `base_model`, `get_output_embeddings()`
        and `config`. Its parameters that require a gradient are trained, the others are frozen.
        """
        ...

    def optimizers(self, weights: Mapping[str, nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
        """Return optimizers that hold each trainable weight once.

        Each group's rate is that of `trainer.lr`'s schedule, scaled by the share of `trainer.lr`
        that the group begins with. Their state, tensors only, is part of checkpoints; with
        `trainer.optimizer_offload` that of each optimizer visits the device as a whole.
        """
        ...

    def published(self, model: Any) -> dict[str, Tensor]:
        """Return every tensor of the transformers model, in the same order on every rank.

        Generators and teachers load them. Called in another thread during a step, so it must not
        communicate with other ranks.
        """
        ...

    def adapters(self, model: Any) -> dict[str, Tensor]:
        """Return the trained tensors by name where the published ones are made from them; else {}.

        A checkpoint keeps them, and a resumed run fills them in place. Without any, it fills the
        published tensors, which then must be the model's own.
        """
        ...


class TorchBackend:
    """A causal LM trained as [trainer] says: optimizer, adapters, sharding, precision."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    def model(self, folder: Path) -> Any:
        """Load the model as [trainer] says: with adapters, compiled, sharded."""
        return trained_model(self.context.config, folder, self.context.ranks)

    def optimizers(self, weights: Mapping[str, nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
        """Return those that the config names, with its settings."""
        return optimizers_of(self.context.trainer, weights)

    def published(self, model: Any) -> dict[str, Tensor]:
        """Return the weights, with adapters merged into them."""
        return export_state(model)

    def adapters(self, model: Any) -> dict[str, Tensor]:
        """Return the weights of `trainer.lora`'s adapters."""
        return dict(adapter_weights(model))


def optimizers_of(
    trainer: TrainerConfig, weights: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Return the config's optimizers of these weights; several of a kind where they are offloaded.

    Muon is that of the layers' matrices, with AdamW for the others.
    """
    found: list[torch.optim.Optimizer] = []
    for make, held in _held(trainer, weights):
        names = list(held)
        parts = [list(range(len(names)))]
        if trainer.optimizer_offload:
            parts = parts_of([local(held[name]).numel() for name in names])
        found += [make(trainer, {names[at]: held[names[at]] for at in part}) for part in parts]
    return found


def _held(
    trainer: TrainerConfig, weights: Mapping[str, nn.Parameter]
) -> Iterator[tuple[_MakeOptimizer, Mapping[str, nn.Parameter]]]:
    """Yield which kind of optimizer has which weights."""
    if trainer.optimizer != "muon":
        yield (adamw if trainer.optimizer == "adamw" else adamw_8bit), weights
        return
    matrices = {n: one for n, one in weights.items() if is_layer_matrix(n, one.shape)}
    for make, sharded in ((muon, False), (sharded_muon, True)):
        if held := {n: one for n, one in matrices.items() if is_dtensor(one) is sharded}:
            yield make, held
    if others := {n: one for n, one in weights.items() if n not in matrices}:
        yield adamw, others


def muon(trainer: TrainerConfig, matrices: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return Muon of these matrices; its updates are as large as AdamW's at the same rate."""
    return torch.optim.Muon(
        matrices.values(),
        lr=trainer.lr,
        weight_decay=trainer.weight_decay,
        adjust_lr_fn=ADJUST,
    )


def sharded_muon(
    trainer: TrainerConfig, matrices: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the Muon of matrices that are sharded over ranks; its updates are those of `muon`."""
    return ShardedMuon(matrices.values(), trainer.lr, trainer.weight_decay)


def adamw(trainer: TrainerConfig, weights: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW of these weights with the config's settings."""
    return torch.optim.AdamW(
        weights.values(),
        lr=trainer.lr,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        weight_decay=trainer.weight_decay,
    )


def adamw_8bit(
    trainer: TrainerConfig, weights: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return AdamW of these weights with its state in 8 bits; raises `LowbitMissing`."""
    from composer_mesh.actors.models.adamw_8bit import AdamW8bit

    return AdamW8bit(weights.values(), trainer)

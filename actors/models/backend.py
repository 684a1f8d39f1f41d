"""The port of the trainer to what it trains: the model of a folder, its optimizers, its exports.

The trainer owns the rest: losses, microbatches, gradient sums over ranks, clipping, the learning
rate, publishing and checkpoint files. `TorchBackend` is what a run uses by default; a backend of
the user's own, `trainer.backend`, implements the same port, or derives from it. What it returns is
checked: every failure is a `CustomFunctionError` that names the backend, with its own as the cause.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer_mesh.actors.models.expert_parallel import context_of, experts_of
from composer_mesh.actors.models.lora import adapter_weights, export_state
from composer_mesh.actors.models.policy import empty_model
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import (
    distinct,
    is_dtensor,
    is_sharded,
    local,
    own_weights,
)
from composer_mesh.actors.models.trained_model import trained_model
from composer_mesh.configs.base import CustomFunction
from composer_mesh.configs.schema import Config
from composer_mesh.configs.trainer import TrainerConfig
from composer_mesh.losses.custom_function import (
    CustomFunctionError,
    call_function,
    check_signature,
    load_function,
)
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

    def optimizers(self, weights: Mapping[str, nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
        """Return optimizers that hold each trainable weight once.

        Each group's rate is that of `trainer.lr`'s schedule, scaled by the share of `trainer.lr`
        that the group begins with. Their state, tensors only, is part of checkpoints; with
        `trainer.optimizer_offload` that of each optimizer visits the device as a whole.
        """

    def published(self, model: Any) -> dict[str, Tensor]:
        """Return every tensor of the transformers model, in the same order on every rank.

        Generators and teachers load them. Called in another thread during a step, so it must not
        communicate with other ranks.
        """

    def adapters(self, model: Any) -> dict[str, Tensor]:
        """Return the trained tensors by name where the published ones are made from them; else {}.

        A checkpoint keeps them, and a resumed run fills them in place. Without any, it fills the
        published tensors, which then must be the model's own.
        """


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
    """Return AdamW of these weights with the config's settings.

    On GPUs it is torch's fused one: by default torch updates sharded weights one after the other.
    It takes weights that are all sharded, or none of them.
    """
    alike = len({is_dtensor(one) for one in weights.values()}) == 1
    fused = alike and all(one.is_cuda for one in weights.values())
    return torch.optim.AdamW(
        weights.values(),
        lr=trainer.lr,
        betas=(trainer.adam_beta1, trainer.adam_beta2),
        weight_decay=trainer.weight_decay,
        fused=fused or None,
    )


def adamw_8bit(
    trainer: TrainerConfig, weights: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """Return AdamW of these weights with its state in 8 bits; raises `LowbitMissing`."""
    from composer_mesh.actors.models.adamw_8bit import AdamW8bit

    return AdamW8bit(weights.values(), trainer)


METHODS = ("model", "optimizers", "published", "adapters")
MODEL_PARTS = ("base_model", "get_output_embeddings", "config", "named_parameters")


def make_backend(config: Config, ranks: Ranks) -> TrainerBackend:
    """Return the backend that a config names; raises `CustomFunctionError`."""
    context, section = BackendContext(config, ranks), config.trainer.backend
    if section is None:
        return TorchBackend(context)
    name, made = section.import_path, check_backend(section)
    backend = call_function(made, name, "", context, section.kwargs)
    if not isinstance(backend, TrainerBackend):
        raise CustomFunctionError(
            name,
            "",
            f"it made a {type(backend).__name__} without the methods {', '.join(METHODS)}"
            ": return a backend",
        )
    return UsersBackend(name, backend, config.trainer.sharded, ranks)


def check_backend(section: CustomFunction) -> Callable[..., Any]:
    """Import a backend's class, or a function that makes one, and return it; nothing is called.

    Raises `CustomFunctionError` where it takes other arguments or lacks a method.
    """
    found, name = load_function(section.import_path), section.import_path
    check_signature(found, name, section.kwargs, given="context")
    missing = [one for one in METHODS if not callable(getattr(found, one, None))]
    if isinstance(found, type) and missing:
        raise CustomFunctionError(
            name,
            "",
            f"it has no method {missing[0]!r}: derive it from composer_mesh.TorchBackend"
            f", or write {', '.join(METHODS)}",
        )
    return found


class UsersBackend:
    """A backend whose results are checked, with errors that say value, bound and repair."""

    def __init__(self, name: str, backend: TrainerBackend, sharded: bool, ranks: Ranks) -> None:
        self._name, self._backend, self._sharded, self._ranks = name, backend, sharded, ranks

    def model(self, folder: Path) -> Any:
        """Return the backend's model; raises for one that the trainer cannot train."""
        model = call_function(self._backend.model, self._name, "model", folder, {})
        self._check_model(model)
        published = self.published(model)
        for name, weight in empty_model(folder).named_parameters():
            found = published.get(name)
            if found is None or found.shape != weight.shape:
                shape = "nothing" if found is None else f"shape {tuple(found.shape)}"
                raise self._error(
                    "published",
                    f"its published {name} is {shape} but must be {tuple(weight.shape)}"
                    f": return what generators load from {folder}",
                )
        own = set(distinct(own_weights(model)))
        if not self.adapters(model) and set(distinct(published)) != own:
            raise self._error(
                "adapters",
                "it publishes other tensors than the model's own and has no adapters"
                ": return the trained tensors from adapters",
            )
        return model

    def _check_model(self, model: Any) -> None:
        missing = [part for part in MODEL_PARTS if not hasattr(model, part)]
        if missing:
            raise self._error(
                "model",
                f"it returned a {type(model).__name__} without {missing[0]!r}"
                ": return a causal LM of transformers",
            )
        if not any(weight.requires_grad for weight in model.parameters()):
            raise self._error(
                "model",
                "no parameter of its model requires a gradient: leave some that are trained",
            )
        for key, requested, found in (
            ("context_parallel", self._ranks.context, context_of(model)),
            ("expert_parallel", self._ranks.experts, experts_of(model)),
        ):
            if requested is not found:
                raise self._error(
                    "model",
                    f"its model is not divided among ranks as trainer.{key} requires"
                    ": load it with super().model, or set that to 1",
                )
        if is_sharded(model) != self._sharded:
            own, wanted = ("sharded", "none") if is_sharded(model) else ("whole", "fsdp2")
            raise self._error(
                "model",
                f"its model is {own} but the config shards it as {wanted!r}"
                ": load it with super().model, or set sharding",
            )

    def optimizers(self, weights: Mapping[str, nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
        """Return the backend's optimizers; raises unless each weight is in one of them, once."""
        found = call_function(self._backend.optimizers, self._name, "optimizers", weights, {})
        if not isinstance(found, list | tuple) or not all(
            isinstance(one, torch.optim.Optimizer) for one in found
        ):
            raise self._error(
                "optimizers",
                f"it returned a {type(found).__name__}: return a list of torch's optimizers",
            )
        held = [id(one) for optimizer in found for group in optimizer.param_groups
                for one in group["params"]]  # fmt: skip
        for name, weight in weights.items():
            if (count := held.count(id(weight))) != 1:
                raise self._error(
                    "optimizers",
                    f"{name} is in {count} of its optimizers' groups but must be in one"
                    ": give them all of `weights`",
                )
        if len(held) != len(weights):
            raise self._error(
                "optimizers",
                f"its optimizers hold {len(held)} tensors but {len(weights)} are trained"
                ": give them `weights` alone",
            )
        return list(found)

    def published(self, model: Any) -> dict[str, Tensor]:
        """Return the published tensors."""
        return self._tensors("published", self._backend.published, model)

    def adapters(self, model: Any) -> dict[str, Tensor]:
        """Return the trained tensors that are not published as they are."""
        return self._tensors("adapters", self._backend.adapters, model)

    def _tensors(self, method: str, call: Callable[[Any], Any], model: Any) -> dict[str, Tensor]:
        found = call_function(call, self._name, method, model, {})
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(one, Tensor) for name, one in found.items()
        ):
            raise self._error(
                method,
                f"it returned a {type(found).__name__} that is not a dict of tensors by name"
                ": return one",
            )
        return found

    def _error(self, method: str, problem: str) -> CustomFunctionError:
        return CustomFunctionError(self._name, method, problem)


ADJUST = "match_rms_adamw"
"""torch's name of the scale by which an update is as large as AdamW's."""


class ShardedMuon(torch.optim.Optimizer):
    """torch's Muon with Nesterov momentum, of DTensors sharded by rows over the ranks of one mesh.

        momentum: each rank, its rows -> all-to-all: rows of R matrices to R owners
        -> each owner orthogonalizes its matrix -> all-to-all: rows back
        -> update: each rank, its rows

    `step` is collective. Matrices are taken in rounds of R, the largest first, so that the owners
    of a round have about the same work. The orthogonalization is torch's, which computes in
    bfloat16: in that the rows travel to the owners, and an update is that of whole matrices.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices; every rank has gradients of the same ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            matrices = [one for one in group["params"] if one.grad is not None]
            matrices.sort(key=lambda one: -one.numel())
            for first in range(0, len(matrices), size := _ranks(matrices)):
                self._update(matrices[first : first + size], group)
        return loss

    def _update(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Update the matrices of one round, the first of which belongs to rank 0."""
        pulls = [self._pull(one, group["momentum"]) for one in matrices]
        updates = _orthogonalized(matrices, pulls)
        for matrix, update in zip(matrices, updates, strict=True):
            rows = local(matrix)
            rows.mul_(1 - group["lr"] * group["weight_decay"])
            rows.add_(update, alpha=group["lr"])

    def _pull(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """Return this rank's rows of the momentum, one step ahead, in bfloat16."""
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        buffer, gradient = local(state["momentum_buffer"]), local(matrix.grad)
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()


def _ranks(matrices: Sequence[Any]) -> int:
    return matrices[0].device_mesh.size() if matrices else 1


def _orthogonalized(matrices: Sequence[Any], pulls: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's rows of the updates of matrices, for a rate of 1, from its `pulls`."""
    mesh = matrices[0].device_mesh
    rank, group = mesh.get_local_rank(), mesh.get_group()
    counts = [_row_counts(one) for one in matrices]
    sent = [pull.numel() for pull in pulls] + [0] * (mesh.size() - len(matrices))
    owned = rank < len(matrices)
    width = matrices[rank].shape[1] if owned else 0
    received = [width * one for one in counts[rank]] if owned else [0] * mesh.size()
    whole = _exchanged(torch.cat([one.flatten() for one in pulls]), sent, received, group)
    update = whole.float()
    if owned:
        update = _update_of(update.view(matrices[rank].shape)).flatten()
    back = _exchanged(update, received, sent, group)
    parts = back.split(sent)[: len(pulls)]
    return [part.view_as(pull) for part, pull in zip(parts, pulls, strict=True)]


def _update_of(pull: Tensor) -> Tensor:
    """Return what torch's Muon adds to a matrix at a rate of 1, given its momentum."""
    matrix = nn.Parameter(torch.zeros_like(pull))
    matrix.grad = pull
    torch.optim.Muon(
        [matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=ADJUST
    ).step()
    return matrix.detach()


def _row_counts(matrix: Any) -> list[int]:
    """Return the rows of each rank: as many as fit, for the first ones."""
    ranks, rows = matrix.device_mesh.size(), matrix.shape[0]
    most = -(-rows // ranks)
    return [max(0, min(most, rows - rank * most)) for rank in range(ranks)]


def _exchanged(values: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """Send runs of values to the ranks; return what arrives."""
    arrived = values.new_empty(sum(received))
    dist.all_to_all_single(arrived, values, [*received], [*sent], group=group)
    return arrived

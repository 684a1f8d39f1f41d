"""How the numbers of clients' models enter the forward of a shared base: adapters, or all weights.

Adapters of several models are in one forward of a frozen base. peft computes them one after
another, and not in training. Here the rows of a batch belong to models in equal parts, so that each
layer is two batched products.

Axes: M models of a batch, R rank, I inputs of a layer, O outputs of a layer, P numbers of one
model's adapters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from composer_mesh.actors.models.lora import adapter_files, linear_layers
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local
from composer_mesh.plugins.tinker.models.batches import MODELS, Shares
from composer_mesh.plugins.tinker.models.messages import ModelSpec
from composer_mesh.plugins.tinker.models.model_state import Numbers, ShardedNumbers, StoredState

ATTENTION = ("attn", "attention")

Pair = tuple[Tensor, Tensor]
"""Of a layer: `down` [M, R, I] and `up` [M, O, R]."""


@dataclass(frozen=True)
class AdapterLayout:
    """The layers that adapters of a model have, in the order of its flat numbers [P]."""

    rank: int
    layers: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of each layer."""

    @classmethod
    def of(cls, model: nn.Module, spec: ModelSpec) -> AdapterLayout:
        """Return the layers of a model that a client trains."""
        found = [name for name in linear_layers(model) if _is_trained(name, spec)]
        if spec.train_unembed:
            found.append(head_name(model))
        shapes = {name: model.get_submodule(name).weight.shape for name in found}
        return cls(spec.rank, tuple((name, shapes[name][1], shapes[name][0]) for name in found))

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of each layer's two factors, one after another."""
        return [n * self.rank for _, inputs, outputs in self.layers for n in (inputs, outputs)]

    @property
    def total(self) -> int:
        """Numbers of a model's adapters."""
        return sum(self.sizes)

    def pairs(self, flat: Tensor) -> dict[str, Pair]:
        """Return the factors of each layer as views of numbers [M, P], for all models at once."""
        parts = flat.split(self.sizes, dim=1)
        found = {}
        for place, (name, inputs, outputs) in enumerate(self.layers):
            down, up = parts[2 * place], parts[2 * place + 1]
            shapes = (-1, self.rank, inputs), (-1, outputs, self.rank)
            found[name] = (down.view(shapes[0]), up.view(shapes[1]))
        return found

    def initial(self, seed: int) -> Tensor:
        """Return the numbers [P] of new adapters, which have no effect: `up` is 0.

        `down` is drawn as nn.Linear's weights are, as peft does.
        """
        generator = torch.Generator().manual_seed(seed)
        flat = torch.zeros(1, self.total)
        for down, _ in self.pairs(flat).values():
            bound = 1 / math.sqrt(down.shape[2])
            down.uniform_(-bound, bound, generator=generator)
        return flat[0]


class ActiveAdapters:
    """The adapters of the forward under way, read by the layers of one model; none at first."""

    def __init__(self, scale: float) -> None:
        self.scale, self.pairs = scale, dict[str, Pair]()

    def use(self, pairs: Mapping[str, Pair], rank: int, alpha: float) -> None:
        """Set the adapters of the next forwards."""
        self.pairs, self.scale = dict(pairs), alpha / rank


class AdaptedLinear(nn.Module):
    """A linear layer whose input rows belong to the models of `active` in equal, ordered parts."""

    def __init__(self, name: str, base: nn.Linear, active: ActiveAdapters) -> None:
        super().__init__()
        self.base = base
        self._name, self._active = name, active

    @property
    def weight(self) -> Tensor:
        """The weight of the layer without adapters."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer."""
        return self.base.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's outputs, with those of the adapters."""
        outputs: Tensor = self.base(inputs)
        pair = self._active.pairs.get(self._name)
        if pair is None:
            return outputs
        down, up = pair
        models = len(down)
        rows = inputs.reshape(models, -1, inputs.shape[-1])
        inner = torch.bmm(rows, down.transpose(1, 2))
        flat = outputs.reshape(models, -1, outputs.shape[-1])
        added = torch.baddbmm(flat, inner, up.transpose(1, 2), alpha=self._active.scale)
        return added.view_as(outputs)


def adapted(model: Any) -> tuple[Any, ActiveAdapters]:
    """Return a frozen copy of a model whose linear layers take adapters; it shares the weights."""
    own, active = shared_copy(model), ActiveAdapters(1.0)
    adapt(own, active)
    return own, active


def adapt(model: Any, active: ActiveAdapters) -> None:
    """Freeze a model whose linear layers take the adapters of `active` from now on, in place."""
    for name in (*linear_layers(model), head_name(model)):
        parent, _, last = name.rpartition(".")
        layer = model.get_submodule(name)
        setattr(model.get_submodule(parent), last, AdaptedLinear(name, layer, active))
    model.requires_grad_(False).eval()


def shared_copy(model: Any) -> Any:
    """Return a copy of a model's modules that shares its parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(one): one for one in tensors})


def head_name(model: Any) -> str:
    """Return the name of a model's head."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def _is_trained(name: str, spec: ModelSpec) -> bool:
    attends = any(part in name.rpartition(".")[0] for part in ATTENTION)
    return spec.train_attn if attends else spec.train_mlp


def peft_files(
    stored: StoredState, layout: AdapterLayout, base: str, alpha: float
) -> dict[str, bytes]:
    """Return the files of a folder for `PeftModel.from_pretrained`, by name."""
    weights = stored.tensors["weights"][None]
    pairs = {name: (down[0], up[0]) for name, (down, up) in layout.pairs(weights).items()}
    return adapter_files(pairs, base, layout.rank, alpha)


class AdapterWeights:
    """Adapters in the linear layers of a frozen base; numbers of places without a model are 0.

    `base` tells the names and shapes of the layers. `placed` is the model with these layers
    adapted, and their adapters, where it is not a copy of `base` that shares its weights: one
    that is sharded over ranks.
    """

    numbers = Numbers()
    """Where the numbers of a model are."""

    def __init__(
        self, base: Any, alpha: float, placed: tuple[Any, ActiveAdapters] | None = None
    ) -> None:
        self._model, self._active = placed or adapted(base)
        self._base, self._alpha = base, alpha
        self._device = next(self._model.parameters()).device
        self._layouts: dict[Hashable, AdapterLayout] = {}

    def layout(self, spec: ModelSpec) -> AdapterLayout:
        """Return where adapters of such models are."""
        key = self.key(spec)
        if key not in self._layouts:
            self._layouts[key] = AdapterLayout.of(self._base, spec)
        return self._layouts[key]

    def initial(self, spec: ModelSpec) -> Tensor:
        return self.layout(spec).initial(spec.seed)

    def key(self, spec: ModelSpec) -> Hashable:
        return (spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed)

    def enter(self, spec: ModelSpec, flats: Sequence[Tensor | None]) -> tuple[Any, Tensor]:
        """Return the model to call, with these numbers at their places, and their leaf [M, P]."""
        layout = self.layout(spec)
        empty = torch.zeros(layout.total, device=self._device)
        leaf = torch.stack([empty if one is None else one for one in flats]).detach()
        leaf.requires_grad_()
        self._active.use(layout.pairs(leaf), layout.rank, self._alpha)
        return self._model, leaf

    def gradients(self, leaf: Tensor, shares: Shares, ranks: Ranks) -> Tensor:
        """Return the gradients [M, P] of all models of a batch, after a backward on all ranks."""
        assert leaf.grad is not None
        if shares.axis == MODELS:
            return torch.cat(ranks.gather_tensors(leaf.grad))
        return ranks.ordered_sum(leaf.grad)


class FullWeights:
    """All weights of the policy, of one model at a time, which are written into it.

    Sharded over several ranks by FSDP2, each rank has its rows of the weights, of their gradients
    and of AdamW's moments, and the rows that the policy began with.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        # Between forwards these are the sharded ones, which a forward replaces.
        self._model, self._weights = model, list(model.parameters())
        self._sizes = [local(one).numel() for one in self._weights]
        self.numbers: Numbers = (
            Numbers() if ranks.size == 1 else ShardedNumbers(self._weights, ranks)
        )
        self._begun = torch.cat([local(one.detach()).reshape(-1) for one in self._weights]).cpu()

    def initial(self, spec: ModelSpec) -> Tensor:
        del spec
        return self._begun.clone()

    def key(self, spec: ModelSpec) -> Hashable:
        return spec.rank

    @torch.no_grad()
    def enter(self, spec: ModelSpec, flats: Sequence[Tensor | None]) -> tuple[Any, Tensor]:
        del spec
        (flat,) = (one for one in flats if one is not None)
        self._model.zero_grad()  # a failed backward may have left some gradients
        for weight, part in zip(self._weights, flat.split(self._sizes), strict=True):
            own = local(weight.detach())
            own.copy_(part.view_as(own))
        return self._model, flat[None]

    @torch.no_grad()
    def gradients(self, leaf: Tensor, shares: Shares, ranks: Ranks) -> Tensor:
        """Return the gradients of this rank's rows, [1, P], which FSDP2 sums over ranks."""
        del leaf, shares, ranks
        each = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._weights]
        self._model.zero_grad()
        return torch.cat([local(one).reshape(-1) for one in each])[None]


ModelWeights = AdapterWeights | FullWeights
"""How the numbers of models enter the forward of a shared base."""

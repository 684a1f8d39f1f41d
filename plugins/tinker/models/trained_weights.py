"""How the numbers of clients' models enter the forward of a shared base."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_mesh.actors.models.language_model import decoder_states
from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import local
from composer_mesh.plugins.tinker.models.adapter_layers import (
    ActiveAdapters,
    AdapterLayout,
    adapted,
    head_name,
    shared_copy,
    stacked,
)
from composer_mesh.plugins.tinker.models.batch_partition import MODELS, Shares
from composer_mesh.plugins.tinker.models.flat_parameters import (
    CompleteNumbers,
    Numbers,
    ShardedNumbers,
)
from composer_mesh.plugins.tinker.models.messages import ModelSpec


class Weights(Protocol):
    """How the numbers of models enter the forward of a shared base."""

    @property
    def numbers(self) -> Numbers:
        """Where the numbers of a model are."""
        ...

    def initial(self, spec: ModelSpec) -> Tensor: ...

    def key(self, spec: ModelSpec) -> Hashable: ...

    def enter(self, spec: ModelSpec, flats: Sequence[Tensor | None]) -> tuple[Any, Tensor]:
        """Return the model to call, with these numbers at their places, and their leaf [M, P]."""
        ...

    def gradients(self, leaf: Tensor, shares: Shares, ranks: Ranks) -> Tensor:
        """Return the gradients [M, P] of all models of a batch, after a backward on all ranks."""
        ...


class AdapterWeights:
    """Adapters in the linear layers of a frozen base; numbers of places without a model are 0.

    `base` tells the names and shapes of the layers. `placed` is the model with these layers
    adapted, and their adapters, where it is not a copy of `base` that shares its weights: one
    that is sharded over ranks.
    """

    numbers = CompleteNumbers()

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
        layout = self.layout(spec)
        empty = torch.zeros(layout.total, device=self._device)
        leaf = stacked([empty if one is None else one for one in flats])
        self._active.use(layout.pairs(leaf), layout.rank, self._alpha)
        return self._model, leaf

    def gradients(self, leaf: Tensor, shares: Shares, ranks: Ranks) -> Tensor:
        assert leaf.grad is not None
        if shares.axis == MODELS:
            return torch.cat(ranks.gather_tensors(leaf.grad))
        return ranks.ordered_sum(leaf.grad)


class FullWeights:
    """All weights of the policy, of one model at a time, on one rank."""

    numbers = CompleteNumbers()

    def __init__(self, base: Any) -> None:
        self._model = shared_copy(base)
        self._names = [name for name, _ in self._model.named_parameters()]
        self._shapes = [one.shape for one in self._model.parameters()]

    def initial(self, spec: ModelSpec) -> Tensor:
        del spec
        return torch.cat([one.detach().reshape(-1) for one in self._model.parameters()])

    def key(self, spec: ModelSpec) -> Hashable:
        return spec.rank

    def enter(self, spec: ModelSpec, flats: Sequence[Tensor | None]) -> tuple[Any, Tensor]:
        del spec
        leaf = stacked([one for one in flats if one is not None])
        return FunctionalModel(self._model, self.tensors(leaf[0])), leaf

    def gradients(self, leaf: Tensor, shares: Shares, ranks: Ranks) -> Tensor:
        del shares, ranks
        assert leaf.grad is not None
        return leaf.grad

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the weights by name, as views of a model's numbers [P]."""
        parts = flat.split([shape.numel() for shape in self._shapes])
        return {
            name: part.view(shape)
            for name, part, shape in zip(self._names, parts, self._shapes, strict=True)
        }


class ShardedWeights:
    """All weights of the policy, of one model at a time, sharded over ranks by FSDP2.

    Each rank has its rows of the weights, of their gradients and of AdamW's moments, and the rows
    that the policy began with.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        # Between forwards these are the sharded ones, which a forward replaces.
        self._model, self._weights = model, list(model.parameters())
        self.numbers = ShardedNumbers(self._weights, ranks)
        self._begun = torch.cat([local(one.detach()).reshape(-1) for one in self._weights])

    def initial(self, spec: ModelSpec) -> Tensor:
        del spec
        return self._begun.clone()

    def key(self, spec: ModelSpec) -> Hashable:
        return spec.rank

    @torch.no_grad()
    def enter(self, spec: ModelSpec, flats: Sequence[Tensor | None]) -> tuple[Any, Tensor]:
        del spec
        (flat,) = (one for one in flats if one is not None)
        for weight, part in zip(self._weights, flat.split(self.numbers.sizes), strict=True):
            own = local(weight.detach())
            own.copy_(part.view_as(own))
        return self._model, flat[None]

    @torch.no_grad()
    def gradients(self, leaf: Tensor, shares: Shares, ranks: Ranks) -> Tensor:
        """Return the sums over ranks that FSDP2 made of this rank's rows, [1, P]."""
        del leaf, shares, ranks
        found = [local(one.grad).reshape(-1) for one in self._weights]
        for one in self._weights:
            one.grad = None
        return torch.cat(found)[None]


class FunctionalModel:
    """A model whose weights are given tensors, with the two calls that a forward makes."""

    def __init__(self, model: Any, weights: dict[str, Tensor]) -> None:
        self.config = model.config
        self._parts, self._weights = _Parts(model), {f"model.{n}": w for n, w in weights.items()}

    def states(self, ids: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self._parts, self._weights, ("states", ids))
        return found

    def head(self, states: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(self._parts, self._weights, ("head", states))
        return found


class _Parts(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, part: str, value: Tensor) -> Tensor:
        if part == "states":
            return decoder_states(self.model, input_ids=value)
        found: Tensor = self.model.get_submodule(head_name(self.model))(value)
        return found

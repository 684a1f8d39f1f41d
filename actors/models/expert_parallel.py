"""Expert parallelism: each rank computes some experts of every layer, for the tokens of many ranks.

    router -> all-to-all: a token's row to the ranks of its experts -> experts -> all-to-all -> sum

Each rank stores rows of a layer's fused experts, as of any sharded weight, so that checkpoints and
weight sync are unchanged. Of R ranks, n divide a layer: each R / n in a row store the same part of
it together, and gather it from one another to compute.

Any experts module of transformers runs, on its own rows: where it has `num_experts` and its weights
are in one tensor for all experts. All ranks make the same calls in the same order.

Axes: N tokens, K experts of a token, M rows that arrive at a rank, E experts, H hidden size.

Context parallelism: the ranks of a group divide the positions of each forward among them.

    decoder layers, head   each rank computes its run of positions
    attention              each rank computes some of the heads, of all positions

Before attention an all-to-all exchanges positions for heads, and after it heads for positions, as
in DeepSpeed-Ulysses (arXiv 2309.14509): what attention computes is unchanged, so packed rows,
windows and grouped heads are exact. Every rank of a group makes the same calls in the same order.

A loss is computed from log-probs of all positions, on every rank of a group alike. Each rank's
backward is through its own positions only, so that gradients summed over ranks are the loss's.

Axes: L positions of a forward, l = L / n of a rank, H heads, D head width, N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from composer_mesh.planning.model_refusals import NoExperts, UndividedExperts

CONTEXT = "context_group"
"""Attribute of a model whose forwards are divided: its `ContextGroup`."""


@dataclass(frozen=True)
class ContextGroup:
    """This process, number `rank` of the `size` that divide the positions of each forward."""

    rank: int
    size: int
    group: Any
    """Their process group."""

    def padded(self, positions: int) -> int:
        """Return a number of positions, rounded up to one that the ranks divide evenly."""
        return -(-positions // self.size) * self.size

    def own(self, positions: int) -> slice:
        """Return this rank's run of so many positions, a multiple of `size`."""
        count = positions // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts; each part has the gradient of the sum."""
        return _Sum.apply(part, self.group)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank of the group."""
        flags = torch.tensor([flag], dtype=torch.int32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags)

    def exchanged(self, tensor: Tensor) -> Tensor:
        """Exchange axis 1 for axis 2 between the ranks.

        Of heads [1, H, l, D] come positions [1, H / n, L, D], of positions [1, L, H / n, D] come
        heads [1, l, H, D].
        """
        sent = torch.stack(tensor.chunk(self.size, dim=1))
        arrived: Tensor = wait_tensor(all_to_all_single(sent, None, None, self.group))
        return torch.cat(arrived.unbind(0), dim=2)

    def repeated(self, keys: Tensor) -> Tensor:
        """Return heads [1, H, l, D] of keys or values, repeated to `size` if there are fewer."""
        heads = keys.shape[1]
        return keys if heads >= self.size else keys.repeat_interleave(self.size // heads, dim=1)


def context_of(model: Any) -> ContextGroup | None:
    """Return the group that divides a model's forwards, None for a model that computes alone."""
    return getattr(model, CONTEXT, None)


class _Sum(torch.autograd.Function):
    """Sums a tensor over a group, every rank of which computes the same from the sum."""

    @staticmethod
    def forward(_ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


DIVIDED = "expert_group"
"""Attribute of a model whose experts are divided: its `ExpertGroup`."""


@dataclass(frozen=True)
class ExpertGroup:
    """This process among `size` ranks that divide a layer's experts.

    `dispatch` is their process group; `gather` that of the `copies` ranks that store what each of
    them computes with, None if that is this rank alone.
    """

    size: int
    copies: int
    dispatch: Any
    gather: Any | None


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold all experts of a layer, each weight as one tensor."""
    for module in model.modules():
        count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
        fused = hasattr(module, "is_transposed") and not list(module.children())[1:]
        if fused and own and all(len(one) == count for one in own):
            yield module


def experts_of(model: Any) -> ExpertGroup | None:
    """Return the group that divides a model's experts, None for a model that has them whole."""
    return getattr(model, DIVIDED, None)


def check_has_experts(model: Any, size: int) -> None:
    """Raise `NoExperts` where a model has none that so many ranks could divide."""
    if not any(True for _ in expert_modules(model)):
        raise NoExperts(type(model).__name__, size)


def check_experts(model: Any, ranks: int) -> None:
    """Raise `UndividedExperts` where so many ranks cannot divide the experts of a model."""
    for module in expert_modules(model):
        if (count := len(next(module.parameters(recurse=False)))) % ranks:
            raise UndividedExperts(type(model).__name__, count, ranks)


def divide_experts(
    model: Any, mesh: DeviceMesh, group: ExpertGroup, dtype: torch.dtype
) -> list[nn.Parameter]:
    """Divide a model's experts over the ranks of a mesh, in place; return their weights.

    Their numbers are lost: fill them afterwards. They are computed in `dtype` from then on.
    """
    divided: list[nn.Parameter] = []
    setattr(model, DIVIDED, group)
    for module in expert_modules(model):
        for name, whole in list(module.named_parameters(recurse=False)):
            own = nn.Parameter(_own_rows(whole.detach(), mesh), whole.requires_grad)
            setattr(module, name, own)
            divided.append(own)
        module.forward = partial(_dispatched, module, group, dtype)
    return divided


def _own_rows(whole: Tensor, mesh: DeviceMesh) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    rows = whole.new_empty(len(whole) // mesh.size(), *whole.shape[1:])
    shape = {"shape": whole.shape, "stride": torch.empty_like(whole, device="meta").stride()}
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, **shape)


class _LocalExperts:
    """An experts module as its forward sees it: only this rank's experts, in the compute dtype."""

    def __init__(self, module: nn.Module, weights: dict[str, Tensor]) -> None:
        self._module = module
        self.num_experts = len(next(iter(weights.values())))
        self.__dict__.update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _dispatched(
    module: nn.Module,
    group: ExpertGroup,
    dtype: torch.dtype,
    states: Tensor,
    experts: Tensor,
    scores: Tensor,
) -> Tensor:
    """Return what a layer's experts compute of states [N, H]: `experts` and `scores` are [N, K]."""
    weights = {
        name: _gathered(weight.to_local(), group, dtype)
        for name, weight in module.named_parameters(recurse=False)
    }
    local = _LocalExperts(module, weights)
    per_token, flat = experts.shape[-1], experts.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=group.size * local.num_experts).view(group.size, -1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group.dispatch)
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    rows = _exchanged(states[order // per_token], sent, received, group)
    outputs = _exchanged(_computed(local, rows, arriving), received, sent, group)
    weighted = outputs * scores.reshape(-1)[order][:, None]
    of_tokens = torch.empty_like(weighted).index_copy(0, order, weighted)
    return of_tokens.view(len(states), per_token, -1).sum(1).to(states.dtype)


def _computed(local: _LocalExperts, rows: Tensor, arriving: Tensor) -> Tensor:
    """Return what this rank's experts compute of rows [M, H], by `arriving` [n, E / n] of each.

    A rank without rows computes one of zeros, so that its weights always have gradients.
    """
    numbers = torch.arange(local.num_experts, device=rows.device).repeat(len(arriving))
    experts = numbers.repeat_interleave(arriving.flatten())
    count = len(rows)
    if not count:
        rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers[:1]
    ones = rows.new_ones(len(rows), 1)
    forward = type(local._module).forward
    found: Tensor = forward(local, rows, experts[:, None], ones)
    return found[:count]


def _gathered(rows: Tensor, group: ExpertGroup, dtype: torch.dtype) -> Tensor:
    """Return the rows of all ranks that store what this rank computes with, in a dtype."""
    if group.gather is None:
        return rows.to(dtype)
    return _Gather.apply(rows, group, dtype)


class _Gather(torch.autograd.Function):
    """Gathers the rows of a weight in a dtype; gradients are summed in that of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ExpertGroup, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = group, rows.dtype
        rows = rows.to(dtype).contiguous()
        whole = rows.new_empty(group.copies * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows, group=group.gather)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        group, gradient = ctx.group, gradient.to(ctx.dtype).contiguous()
        rows = gradient.new_empty(len(gradient) // group.copies, *gradient.shape[1:])
        dist.reduce_scatter_tensor(rows, gradient, group=group.gather)
        return rows, None, None


def _exchanged(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ExpertGroup
) -> Tensor:
    arrived = all_to_all_single(rows.contiguous(), [*received], [*sent], group.dispatch)
    return wait_tensor(arrived)

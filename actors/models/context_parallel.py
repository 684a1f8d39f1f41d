"""Context parallelism: the ranks of a group divide the positions of each forward among them.

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

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

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
        found: Tensor = _Sum.apply(part, self.group)
        return found

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

"""The flat parameters [P] of a client's model: complete on each rank, or sharded by FSDP2.

Files have all of them, one weight after another, whatever the number of ranks that wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_mesh.actors.models.ranks import Ranks
from composer_mesh.actors.models.sharding import from_rows, local, rows_of


class Numbers(Protocol):
    """How numbers of one model are divided; all ranks make all calls, which raise `RanksLost`."""

    @property
    def total(self) -> int | None:
        """How many there are on all ranks; None where those of this rank are all."""
        ...

    def whole(self, own: Tensor) -> Tensor:
        """Return all numbers on the first rank; elsewhere maybe none."""
        ...

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's of all numbers."""
        ...

    def norm(self, own: Tensor) -> float:
        """Return the norm of all numbers, the same on each rank."""
        ...

    def everywhere(self, flag: bool) -> bool:
        """Whether a flag is set on every rank."""
        ...


class CompleteNumbers:
    """All numbers are on each rank, and equal there."""

    total: int | None = None

    def whole(self, own: Tensor) -> Tensor:
        return own

    def own(self, whole: Tensor) -> Tensor:
        return whole

    def norm(self, own: Tensor) -> float:
        return float(own.norm(dtype=torch.float64))

    def everywhere(self, flag: bool) -> bool:
        return flag


class ShardedNumbers:
    """Each rank has its rows of each weight, as FSDP2 shards them."""

    def __init__(self, weights: Sequence[Any], ranks: Ranks) -> None:
        self._weights, self._ranks = list(weights), ranks
        self.sizes = [local(one).numel() for one in self._weights]
        """Numbers of each weight on this rank."""
        self.total: int | None = sum(one.numel() for one in self._weights)

    @torch.no_grad()
    def whole(self, own: Tensor) -> Tensor:
        parts = []
        for part, weight in zip(own.split(self.sizes), self._weights, strict=True):
            rows: Any = from_rows(part.view_as(local(weight)), weight, weight.shape)
            with self._ranks.waiting_for_each_other():
                gathered: Tensor = rows.full_tensor()
            if self._ranks.rank == 0:
                parts.append(gathered.reshape(-1).to("cpu"))
        return torch.cat(parts) if parts else own.new_empty(0)

    @torch.no_grad()
    def own(self, whole: Tensor) -> Tensor:
        parts = whole.split([one.numel() for one in self._weights])
        cut = [
            local(rows_of(part.view(weight.shape), weight)).reshape(-1)
            for part, weight in zip(parts, self._weights, strict=True)
        ]
        return torch.cat(cut)

    def norm(self, own: Tensor) -> float:
        own_square = float(own.square().sum(dtype=torch.float64))
        with self._ranks.waiting_for_each_other():
            return math.sqrt(sum(self._ranks.gather(own_square)))

    def everywhere(self, flag: bool) -> bool:
        with self._ranks.waiting_for_each_other():
            return all(self._ranks.gather(flag))

"""Partition of a batch's rows over ranks, by its shape and the number of ranks alone.

    by rows      every rank has all models, and some rows of each
    by models    every rank has all rows of some models, where that is less: many models of few rows

So a call that is repeated in its shape is computed by the same ranks, beside the same padding.

Axes: M models of a batch, R rows of each, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from composer_mesh.plugins.tinker.models.messages import Shape

MODELS, ROWS = 0, 1


@dataclass(frozen=True)
class Shares:
    """The equal parts of a batch, one a rank; zeros pad the last ones."""

    shape: Shape
    ranks: int
    axis: int
    """`MODELS` or `ROWS`: what is divided."""

    @classmethod
    def of(cls, shape: Shape, ranks: int) -> Shares:
        """Return the parts with the fewest rows on a rank; by rows where both are equal."""
        by_rows, by_models = cls(shape, ranks, ROWS), cls(shape, ranks, MODELS)
        return by_models if by_models.tokens < by_rows.tokens else by_rows

    @property
    def part(self) -> Shape:
        """The models and rows of each rank."""
        each = [self.shape.models, self.shape.rows]
        each[self.axis] = -(-each[self.axis] // self.ranks)
        return Shape(each[MODELS], 0, each[ROWS], self.shape.length)

    @property
    def tokens(self) -> int:
        """Padded tokens that each rank computes."""
        return self.part.models * self.part.rows * self.shape.length

    def models_of(self, rank: int) -> range:
        """Return the places of a rank's models; those beyond the batch are padding."""
        count = self.part.models
        return range(rank * count, (rank + 1) * count) if self.axis == MODELS else range(count)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's rows of a batch [M * R, ...]."""
        part, divided = self.part, whole.unflatten(0, (self.shape.models, self.shape.rows))
        own = divided.tensor_split(self._ends(divided), self.axis)[rank]
        padded = own.new_zeros(part.models, part.rows, *whole.shape[1:])
        padded[: own.shape[MODELS], : own.shape[ROWS]] = own
        return padded.flatten(0, 1)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of all ranks as a batch [M * R, ...], without padding of shares."""
        divided = [one.unflatten(0, (self.part.models, self.part.rows)) for one in parts]
        whole = torch.cat(divided, self.axis)[: self.shape.models, : self.shape.rows]
        return whole.flatten(0, 1)

    def _ends(self, divided: Tensor) -> list[int]:
        count, each = divided.shape[self.axis], (self.part.models, self.part.rows)[self.axis]
        return [min(count, rank * each) for rank in range(1, self.ranks)]

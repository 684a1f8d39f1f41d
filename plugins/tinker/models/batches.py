"""Which operations of several models are computed together, and their padded tensors.

Pure: decides by shapes alone, so that the same calls are always put together the same way.

The rows of a batch are divided over ranks by its shape and the number of ranks alone:

    by rows      every rank has all models, and some rows of each
    by models    every rank has all rows of some models, where that is less: many models of few rows

So a call that is repeated in its shape is computed by the same ranks, with the same padding.

Axes: M models of a batch, R rows of each, B = M * R rows, models' rows one after another; T padded
tokens; K targets of a token; N ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from composer_mesh.plugins.tinker.client_losses import CLIENT_LOSSES, side_of
from composer_mesh.plugins.tinker.models.messages import BatchShape, Datum, TrainCall

MODELS, ROWS = 0, 1


@dataclass(frozen=True)
class Shares:
    """The equal parts of a batch, one a rank; zeros pad the last ones."""

    shape: BatchShape
    ranks: int
    axis: int
    """`MODELS` or `ROWS`: what is divided."""

    @classmethod
    def of(cls, shape: BatchShape, ranks: int) -> Shares:
        """Return the parts with the fewest rows on a rank; by rows where both are equal."""
        by_rows, by_models = cls(shape, ranks, ROWS), cls(shape, ranks, MODELS)
        return by_models if by_models.tokens < by_rows.tokens else by_rows

    @property
    def part(self) -> BatchShape:
        """The models and rows of each rank."""
        each = [self.shape.models, self.shape.rows]
        each[self.axis] = -(-each[self.axis] // self.ranks)
        return BatchShape(each[MODELS], 0, each[ROWS], self.shape.length)

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


WASTE = 2.0
"""A batch of several models has at most so many times the tokens that its calls have alone."""
MULTIPLE = 8
"""Padded lengths are multiples of this, so that fewer shapes occur."""


@dataclass(frozen=True)
class Batch:
    """Calls that are computed in one forward, each in its shape."""

    calls: tuple[TrainCall, ...]
    shapes: tuple[BatchShape, ...]


@dataclass(frozen=True)
class TokenLimit:
    """The padded tokens of one forward on each rank, where `ranks` divide its rows."""

    tokens: int
    ranks: int = 1

    def allows(self, models: int, rows: int, length: int) -> bool:
        """Whether a batch of this shape is within the limit on every rank."""
        return Shares.of(BatchShape(models, 0, rows, length), self.ranks).tokens <= self.tokens


def batches(
    calls: Sequence[tuple[TrainCall, Hashable]], most: TokenLimit, most_models: int
) -> Iterator[Batch]:
    """Yield all calls in batches of those with equal keys, in the order of each first call.

    A call with a shape of its own, or beyond the limit, is alone.
    """
    left = list(calls)
    while left:
        (first, key), *others = left
        together, left = [first], []
        for other, its_key in others:
            grown = [*together, other]
            alike = its_key == key and first.shape is None and other.shape is None
            if alike and _fit(grown, most, most_models):
                together = grown
            else:
                left.append((other, its_key))
        yield Batch(tuple(together), _shapes(together))


def _fit(calls: Sequence[TrainCall], most: TokenLimit, most_models: int) -> bool:
    rows, length = _size(calls)
    padded = len(calls) * rows * length
    alone = sum(_tokens(one) for one in calls)
    fits = most.allows(len(calls), rows, length)
    return len(calls) <= most_models and fits and padded <= WASTE * alone


def _tokens(call: TrainCall) -> int:
    rows, length = _size([call])
    return rows * length


def _size(calls: Sequence[TrainCall]) -> tuple[int, int]:
    rows = max(len(call.data) for call in calls)
    longest = max(len(one.tokens) for call in calls for one in call.data)
    return rows, -(-longest // MULTIPLE) * MULTIPLE


def _shapes(calls: Sequence[TrainCall]) -> tuple[BatchShape, ...]:
    if calls[0].shape is not None:
        return (calls[0].shape,)
    rows, length = _size(calls)
    return tuple(BatchShape(len(calls), place, rows, length) for place in range(len(calls)))


def microbatches(call: TrainCall, shape: BatchShape, most: TokenLimit) -> list[tuple[Datum, ...]]:
    """Return the parts of a call that is alone, each within the limit.

    One that was computed with others is in one part. The sides of a pair stay together.
    """
    if shape.models > 1 or most.allows(1, shape.rows, shape.length):
        return [call.data]
    parts: list[list[Datum]] = [[]]
    longest = 0
    for group in _inseparable(call):
        own = max(len(datum.tokens) for datum in group)
        longest = max(longest, own)
        if parts[-1] and not most.allows(1, len(parts[-1]) + len(group), longest):
            parts.append([])
            longest = own
        parts[-1] += group
    return [tuple(part) for part in parts]


def _inseparable(call: TrainCall) -> Iterator[list[Datum]]:
    """Yield the sequences of a call, a preferred answer with the rejected one after it."""
    data = iter(call.data)
    paired = CLIENT_LOSSES[call.loss].has_pairs
    for datum in data:
        first = paired and side_of(datum.inputs["preference"]) > 0
        yield [datum, next(data)] if first else [datum]


@dataclass(frozen=True)
class Padded:
    """The rows of some calls: ids [B, T], targets [B, T, K] and which of these are real."""

    ids: Tensor
    mask: Tensor
    targets: Tensor


def padded(parts: Sequence[Sequence[Datum]], shape: BatchShape) -> Padded:
    """Return the padded rows of calls at their places; places without a call are of id 0."""
    total = shape.models * shape.rows
    k = max((target_count(one) for part in parts for one in part), default=1)
    ids = np.zeros((total, shape.length), np.int64)
    mask = np.zeros((total, shape.length, k), bool)
    targets = np.zeros((total, shape.length, k), np.int64)
    for place, part in enumerate(parts):
        for row, datum in enumerate(part, start=place * shape.rows):
            length = len(datum.tokens)
            ids[row, :length] = datum.tokens
            mask[row, :length, : target_count(datum)] = True
            given = datum.inputs["target_tokens"]
            targets[row, :length, : target_count(datum)] = given.reshape(length, -1)
    return Padded(*map(torch.from_numpy, (ids, mask, targets)))


def padded_inputs(data: Sequence[Datum], like: Tensor) -> dict[str, Tensor]:
    """Return the loss's inputs of one call's rows, each of the shape of `like`, [rows, T(, K)].

    Names are those of the first row.
    """
    names = [name for name in data[0].inputs if name != "target_tokens"] if data else []
    found = {name: np.zeros(tuple(like.shape), np.float32) for name in names}
    for row, datum in enumerate(data):
        for name in names:
            values, own = datum.inputs[name], found[name][row]
            if own.ndim == 2:
                own[: len(values), : target_count(datum)] = values.reshape(len(values), -1)
            else:
                own[: len(values)] = values.reshape(len(values))
    return {name: torch.from_numpy(values).to(like.device) for name, values in found.items()}


def target_count(datum: Datum) -> int:
    """Return the targets K of each token."""
    targets = datum.inputs["target_tokens"]
    return 1 if targets.ndim == 1 else int(targets.shape[1])

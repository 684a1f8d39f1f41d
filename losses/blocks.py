"""Scores of a linear head and their gradients, one block of rows or of columns at a time.

Shared by the fused losses: a scratch buffer that all blocks of scores reuse, and sums of gradients
in float32 or better. Independent of the loss that uses the scores. Axes: N rows, H hidden size, V
vocabulary, R rows of one block, C columns of the vocabulary.

A loss whose gradient needs one number of each row alone takes blocks of columns: the gradient of
their part of the head is one product over all rows, and no sum the size of the head is kept.

A rule is what a fused loss computes on one block of scores: its value, and its gradient by the
scores, which it may overwrite.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from composer_mesh.losses.reductions import Number

# Elements of the score buffer: 16 MiB in float32 on a CPU, to fit its caches, and 256 MiB on an
# accelerator, whose matrix units need many rows at once.
CPU_BLOCK, ACCELERATOR_BLOCK = 1 << 22, 1 << 26
# Elements that elementwise passes on a CPU process at a time: they fit its cache.
CPU_TILE = 1 << 17
# Rows of a tile of an accelerator's matrix units; blocks are multiples, so that none is half empty.
MATRIX_TILE = 128


def default_block(hidden: Tensor) -> int:
    """Return the number of elements in the buffer on the device of the hidden states."""
    return CPU_BLOCK if hidden.device.type == "cpu" else ACCELERATOR_BLOCK


F = TypeVar("F", bound=Callable[..., Any])


def one_pass(function: F, device: torch.device) -> F:
    """Return an elementwise function, compiled with CUDA: its steps read and write memory once.

    Warns, and returns it as it is, where Triton or the C compiler that it needs is missing.
    """
    return function if device.type != "cuda" or not _can_compile() else _compiled(function)


@cache
def _compiled(function: F) -> F:
    return torch.compile(function, dynamic=True)


@cache
def _can_compile() -> bool:
    from torch.utils._triton import has_triton

    compiler = any(shutil.which(one) for one in (os.environ.get("CC", "cc"), "gcc", "clang"))
    if has_triton() and compiler:
        return True
    missing = "Triton" if compiler else "a C compiler"
    warnings.warn(
        f"fused losses run uncompiled, which takes more time and memory: install {missing}",
        stacklevel=2,
    )
    return False


def tiles(*blocks: Shaped[Tensor, "R _"]) -> Iterator[tuple[Tensor, ...]]:
    """Views of a few rows of each block, small enough for a CPU's cache; one view elsewhere."""
    rows = max(1, len(blocks[0]))
    if blocks[0].device.type == "cpu":
        rows = max(1, CPU_TILE // max(block.shape[-1] for block in blocks))
    return zip(*(block.split(rows) for block in blocks), strict=True)


@dataclass(frozen=True)
class LinearHead:
    """A head whose scores are `softcapped(hidden @ weight.T + bias) / temperature`, in `dtype`."""

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, "V"] | None
    temperature: Number
    dtype: torch.dtype
    softcap: Number | None = None

    def scores(
        self, hidden: Float[Tensor, "N H"], block: int, *, rows: int | None = None
    ) -> Iterator[tuple[slice, Float[Tensor, "R V"]]]:
        """Yield each block of rows with its scores, in a buffer that the next block overwrites.

        A block has `rows` rows, by default as many as `block` elements hold, and at least one.
        """
        rows = rows or rows_per_block(len(self.weight), block)
        shape = (min(rows, len(hidden)), len(self.weight))
        scratch = hidden.new_empty(shape, dtype=self.dtype)
        for start in range(0, len(hidden), rows):
            place = slice(start, min(start + rows, len(hidden)))
            out = scratch[: place.stop - place.start]
            self._score(hidden[place], out)
            yield place, out

    def scores_by_columns(
        self, hidden: Float[Tensor, "N H"], block: int
    ) -> Iterator[tuple[slice, Float[Tensor, "N C"]]]:
        """Yield blocks of columns with the scores of all rows, as `scores` does blocks of rows.

        Yields none without rows.
        """
        count, rows = len(self.weight), len(hidden)
        width = min(count, max(1, block // max(1, rows)))
        scratch = hidden.new_empty(rows * width, dtype=self.dtype)
        if not on_half_units(self.weight, scratch):
            hidden = hidden.to(self.dtype)
        for start in range(0, count if rows else 0, width):
            columns = slice(start, min(start + width, count))
            out = scratch[: rows * (columns.stop - start)].view(rows, -1)
            product(hidden, self.weight[columns].T, out)
            self._finish(out, None if self.bias is None else self.bias[columns])
            yield columns, out

    def _score(self, hidden: Float[Tensor, "R H"], out: Float[Tensor, "R V"]) -> None:
        for columns in self.columns():
            product(hidden, self.weight[columns].T, out[:, columns])
        self._finish(out, self.bias)

    def _finish(self, out: Float[Tensor, "R C"], bias: Float[Tensor, "C"] | None) -> None:
        """Turn products into scores, in place."""
        if bias is not None:
            out.add_(bias)
        if self.softcap is not None:
            for (tile,) in tiles(out):
                tile.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            out.div_(self.temperature)

    def slopes(self, scores: Float[Tensor, "R V"]) -> Float[Tensor, "R V"] | None:
        """Return the derivative of the cap where it gave these scores; None without a cap."""
        if self.softcap is None:
            return None
        return scores.mul(self.temperature / self.softcap).square_().neg_().add_(1)

    def columns(self) -> Iterator[slice]:
        """Yield all columns at once, or as many as may be copied to another dtype at a time."""
        count, hidden = self.weight.shape
        whole = self.weight.dtype == self.dtype or self.weight.is_cuda
        step = count if whole else default_block(self.weight) // hidden
        return (slice(start, start + step) for start in range(0, count, max(1, step)))


class HeadGradients:
    """Gradients of hidden states, weight and bias, summed over blocks; only the required ones."""

    def __init__(
        self, head: LinearHead, hidden: Float[Tensor, "N H"], wanted: tuple[bool, ...]
    ) -> None:
        self.wanted = any(wanted)
        self._head, self._hidden = head, hidden
        self._slopes: Tensor | None = None
        sources = (hidden, head.weight, head.bias)
        self._sums = [
            torch.zeros_like(source, dtype=head.dtype) if want and source is not None else None
            for source, want in zip(sources, wanted, strict=True)
        ]

    def scores(
        self, block: int, *, rows: int | None = None
    ) -> Iterator[tuple[slice, Float[Tensor, "R V"]]]:
        """Yield `LinearHead.scores` of the hidden states; `add` of a block comes before the next.

        A head with a cap takes a second buffer of a block's size.
        """
        for place, scores in self._head.scores(self._hidden, block, rows=rows):
            self._slopes = self._head.slopes(scores) if self.wanted else None
            yield place, scores

    def add(self, rows: slice, pull: Float[Tensor, "R V"]) -> None:
        """Add what follows from the gradient of the loss by the scores before the temperature."""
        if self._slopes is not None:
            pull.mul_(self._slopes)
        of_hidden, of_weight, of_bias = self._sums
        if of_bias is not None:
            of_bias.add_(pull.sum(0))
        if on_half_units(self._head.weight, pull) and on_half_units(self._hidden, pull):
            pull = pull.to(self._head.weight.dtype)
        for columns in self._head.columns():
            part = pull[:, columns]
            if of_hidden is not None:
                add_product(part, self._head.weight[columns], of_hidden[rows])
            if of_weight is not None:
                add_product(part.T, self._hidden[rows], of_weight[columns])

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the sums, in the dtypes of the tensors that they are gradients of."""
        hidden, weight, bias = self._sums
        return (
            None if hidden is None else hidden.to(self._hidden.dtype),
            None if weight is None else weight.to(self._head.weight.dtype),
            None if bias is None or self._head.bias is None else bias.to(self._head.bias.dtype),
        )


def softcapped(scores: Tensor, softcap: Number | None) -> Tensor:
    """Return `softcap * tanh(scores / softcap)`, as Gemma caps its logits; None caps nothing."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def given_scores(
    scores: Float[Tensor, "N V"], temperature: Number, dtype: torch.dtype, rows: int
) -> Iterator[tuple[slice, Float[Tensor, "R V"]]]:
    """Yield existing scores in blocks, as copies."""
    for start in range(0, len(scores), rows):
        place = slice(start, min(start + rows, len(scores)))
        yield place, scores[place].to(dtype, copy=True).div_(temperature)


def rows_per_block(vocabulary: int, block: int) -> int:
    """Return the number of rows whose scores fit `block` elements; at least one."""
    rows = max(1, block // max(1, vocabulary))
    return rows - rows % MATRIX_TILE if rows > 2 * MATRIX_TILE else rows


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """`out = left @ right` with sums in the dtype of `out`."""
    if left.dtype == right.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif on_half_units(right, out):
        torch.mm(left.to(right.dtype), right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def add_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """`out += left @ right` with sums in the dtype of `out`."""
    if on_half_units(right, out):
        torch.addmm(out, left.to(right.dtype), right, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype))


def put_product(left: Tensor, right: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """`out = left @ right` with sums in `dtype`, which `out` may be narrower than."""
    if out.dtype == dtype:
        product(left, right, out)
        return
    sums = torch.empty_like(out, dtype=dtype)
    product(left, right, sums)
    out.copy_(sums)


def on_half_units(right: Tensor, out: Tensor) -> bool:
    """Whether an accelerator multiplies halves and sums them in float32; a CPU does not."""
    return out.is_cuda and out.dtype == torch.float32 and right.dtype.itemsize == 2


RowLoss = Callable[[Float[Tensor, "R V"], Float[Tensor, "R V"], slice], Float[Tensor, ""]]
"""A loss on a block's scores: student's, teacher's, and the block's slice of the N rows."""

Rule = Callable[[Tensor, Tensor, slice, bool], tuple[Tensor, Tensor | None]]
"""A block's loss, and its gradient by the student's scores before the temperature, if wanted.

Arguments are the scores (student's, teacher's), the rows and whether gradients are wanted. A rule
may overwrite the scores.
"""


@dataclass(frozen=True)
class JsdRule:
    """The divergence of a block, with its gradient written over the student's scores.

    With S and P the two distributions, M their mixture and e the student's own terms of the
    divergence, the gradient by a score is (e - S sum(e)) / temperature. To the tensors of `sink`
    entropies are added; those of `by_row` take each row's divergence.
    """

    jsd_beta: Number
    temperature: Number
    scale: float
    sink: list[Tensor]
    by_row: list[Tensor]

    def __call__(
        self, own: Tensor, others: Tensor, rows: slice, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        total, first = own.new_zeros(()), rows.start
        scale = own.new_full((), self.scale)  # not a number, for which it would be compiled again
        work = one_pass(jsd_tile, own.device)
        for s, p in tiles(own, others):
            values, entropies = work(
                s, p, scale, self.jsd_beta, self.temperature, wanted, bool(self.sink)
            )
            for sums in self.sink:
                sums.add_(entropies)
            for divergences in self.by_row:
                divergences[first : first + len(values)] = values
            first += len(values)
            total += values.sum()
        return total * scale, own if wanted else None


def jsd_tile(
    s: Tensor,
    p: Tensor,
    scale: Tensor,
    beta: Number,
    temperature: Number,
    wanted: bool,
    figures: bool,
) -> tuple[Tensor, Tensor]:
    """Return each row's divergence of some scores, and if `figures` both entropies times `scale`.

    If `wanted`, the gradient times `scale` is written over the student's scores. Both are
    overwritten in any case.
    """
    s.sub_(s.logsumexp(-1, keepdim=True))
    p.sub_(p.logsumexp(-1, keepdim=True))
    student, teacher = s.exp(), p.exp()
    entropies = scale
    if figures:
        entropies = torch.stack([(student * s).sum(), (teacher * p).sum()]) * -scale
    if beta == 0:
        values, terms = (p.sub_(s) * teacher).sum(-1), teacher.neg_()
    elif beta == 1:
        terms = p.neg_().add_(s).mul_(student)
        values = terms.sum(-1)
    else:
        # 0 log 0 is 0: where the mixture underflows, both factors of its logarithm are 0.
        mixture = torch.lerp(student, teacher, beta).clamp_min_(torch.finfo(s.dtype).tiny).log_()
        others = p.sub_(mixture).mul_(teacher).sum(-1)
        terms = s.sub_(mixture).mul_(student).mul_(1 - beta)
        values = beta * others + terms.sum(-1)
    if wanted:
        student.mul_(terms.sum(-1, keepdim=True))
        torch.sub(terms, student, out=s).mul_(scale / temperature)
    return values, entropies


def autograd_rule(loss: RowLoss) -> Rule:
    """Return the rule of any loss, whose gradient autograd computes."""

    def rule(own: Tensor, others: Tensor, rows: slice, wanted: bool) -> tuple[Tensor, Any]:
        if not wanted:
            return loss(own, others, rows), None
        with torch.enable_grad():
            leaf = own.detach().requires_grad_()
            value = loss(leaf, others, rows)
        return value.detach(), torch.autograd.grad(value, leaf)[0]

    return rule

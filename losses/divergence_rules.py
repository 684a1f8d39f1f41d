"""What a fused loss computes on one block of scores: its value, and its gradient by the scores.

Axes: R rows of one block, V vocabulary. A rule may overwrite the scores that it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from composer_mesh.losses.blocks import tiles
from composer_mesh.losses.reductions import Number

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
        for s, p in tiles(own, others):
            s.sub_(s.logsumexp(-1, keepdim=True))
            p.sub_(p.logsumexp(-1, keepdim=True))
            values, student, terms = self._terms(s, p)
            for divergences in self.by_row:
                divergences[first : first + len(values)] = values
            first += len(values)
            total += values.sum()
            if wanted:
                student.mul_(terms.sum(-1, keepdim=True))
                torch.sub(terms, student, out=s).mul_(self.scale / self.temperature)
        return total * self.scale, own if wanted else None

    def _terms(self, s: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's divergence, S and e, from log S and log P."""
        student, teacher = s.exp(), p.exp()
        for entropies in self.sink:
            sums = torch.stack([(student * s).sum(), (teacher * p).sum()])
            entropies.sub_(sums * self.scale)
        if self.jsd_beta == 0:
            return (p.sub_(s) * teacher).sum(-1), student, teacher.neg_()
        if self.jsd_beta == 1:
            terms = p.neg_().add_(s).mul_(student)
            return terms.sum(-1), student, terms
        # 0 log 0 is 0: where the mixture underflows, both factors in front of its logarithm are 0.
        mixture = torch.lerp(student, teacher, self.jsd_beta).clamp_min_(torch.finfo(s.dtype).tiny)
        mixture.log_()
        others = p.sub_(mixture).mul_(teacher).sum(-1)
        terms = s.sub_(mixture).mul_(student).mul_(1 - self.jsd_beta)
        return self.jsd_beta * others + terms.sum(-1), student, terms


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

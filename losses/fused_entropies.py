"""Fused linear head and entropies: one number a row, with its gradient, block by block.

As in `fused`, the scores of a block of rows are freed before those of the next are computed.

Axes: N rows (tokens under the mask), H hidden size, V vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_mesh.losses.blocks import HeadGradients, LinearHead, default_block, tiles
from composer_mesh.losses.fused import check_linear, sum_dtype
from composer_mesh.losses.reductions import Number


def linear_entropies(
    hidden: Float[Tensor, "N H"],
    weight: Float[Tensor, "V H"],
    *,
    bias: Float[Tensor, "V"] | None = None,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    block: int | None = None,
) -> Float[Tensor, "N"]:
    """Entropy of `softmax((hidden @ weight.T + bias) / temperature)` of each row, in nats.

    Equals `token_entropies` on those scores, which have to be finite. The forward keeps two numbers
    a row and the backward makes the scores again. Rows whose gradient is 0 cost nothing in the
    backward. `block` and `softcap` are those of `linear_logprobs`.
    """
    check_linear(temperature, block, softcap)
    size = block or default_block(hidden)
    found: Tensor = _LinearEntropies.apply(hidden, weight, bias, temperature, size, softcap)
    return found


class _LinearEntropies(torch.autograd.Function):
    """Entropies of rows; keeps them, and the log of each row's partition sum.

    With p the distribution of a row and E its entropy, the gradient by a score divided by the
    temperature is -p (log p + E).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Number,
        block: int,
        softcap: Number | None,
    ) -> Tensor:
        head = LinearHead(weight, bias, temperature, sum_dtype(hidden), softcap)
        found, log_z = hidden.new_empty((2, len(hidden), 1), dtype=head.dtype)
        for rows, scores in head.scores(hidden, block):
            for entropy, normal, tile in tiles(found[rows], log_z[rows], scores):
                normal.copy_(tile.logsumexp(-1, keepdim=True))
                tile.sub_(normal)
                entropy.copy_(-(tile.exp() * tile).sum(-1, keepdim=True))
        ctx.save_for_backward(hidden, weight, bias, found, log_z)
        ctx.temperature, ctx.block, ctx.softcap = temperature, block, softcap
        return found.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, found, log_z = ctx.saved_tensors
        head = LinearHead(weight, bias, ctx.temperature, log_z.dtype, ctx.softcap)
        active = gradient.ne(0).nonzero().squeeze(-1)
        some, entropies, log_z = hidden[active], found[active], log_z[active]
        factor = (gradient[active] / ctx.temperature).unsqueeze(-1)
        gradients = HeadGradients(head, some, ctx.needs_input_grad[:3])
        for rows, scores in gradients.scores(ctx.block):
            parts = tiles(scores, log_z[rows], entropies[rows], factor[rows])
            for tile, normal, entropy, weigh in parts:
                tile.sub_(normal)
                probability = tile.exp()
                tile.add_(entropy).mul_(probability).mul_(-weigh)
            gradients.add(rows, scores)
        of_some, of_weight, of_bias = gradients.result()
        of_hidden = None
        if of_some is not None:
            of_hidden = torch.zeros_like(hidden).index_copy_(0, active, of_some)
        return of_hidden, of_weight, of_bias, None, None, None

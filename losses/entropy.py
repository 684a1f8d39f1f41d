"""The policy's entropy at each token, and the mask of the tokens with the highest.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary.

An entropy bonus is `aggregate(token_entropies(...), mask, kind, normalizer)` times a weight,
subtracted from a loss.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_mesh.losses.blocks import HeadGradients, LinearHead, default_block, tiles
from composer_mesh.losses.fused import check_linear, sum_dtype
from composer_mesh.losses.opd import entropy
from composer_mesh.losses.reductions import Number, at_least_float32, check_temperature


def token_entropies(
    logits: Float[Tensor, "*B T V"], temperature: Number = 1.0
) -> Float[Tensor, "*B T"]:
    """Entropy of `softmax(logits / temperature)` at each token, in nats, with its gradient."""
    check_temperature(temperature)
    return entropy((at_least_float32(logits) / temperature).log_softmax(-1))


def high_entropy_mask(
    entropies: Float[Tensor, "*B T"], mask: Bool[Tensor, "*B T"], fraction: Number = 0.2
) -> Bool[Tensor, "*B T"]:
    """The masked tokens whose entropy is among the highest `fraction` (arXiv 2506.01939).

    Those at or above the (1 - fraction) quantile of all masked entropies passed, interpolated: pass
    the whole step. As `sampling_weights` of a loss, in floating point, it keeps the policy gradient
    on these tokens and normalizer and KL penalty on all, as TRL does.
    Source: TRL `GRPOTrainer.get_high_entropy_mask`, top_entropy_quantile.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction} but has to be in (0, 1]: use 0.2, or 1 for all")
    chosen = at_least_float32(entropies.detach())[mask]
    if chosen.numel() == 0:
        return mask
    ordered = chosen.sort().values
    place = (1 - fraction) * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[low], ordered[high], place - low)
    return mask & (torch.where(mask, at_least_float32(entropies.detach()), 0.0) >= threshold)


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
    return _LinearEntropies.apply(hidden, weight, bias, temperature, size, softcap)


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
            for total, normal, tile in tiles(found[rows], log_z[rows], scores):
                normal.copy_(tile.logsumexp(-1, keepdim=True))
                tile.sub_(normal)
                total.copy_(-(tile.exp() * tile).sum(-1, keepdim=True))
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
            for tile, normal, total, weigh in parts:
                tile.sub_(normal)
                probability = tile.exp()
                tile.add_(total).mul_(probability).mul_(-weigh)
            gradients.add(rows, scores)
        of_some, of_weight, of_bias = gradients.result()
        of_hidden = None
        if of_some is not None:
            of_hidden = torch.zeros_like(hidden).index_copy_(0, active, of_some)
        return of_hidden, of_weight, of_bias, None, None, None

"""Entropies of next-token distributions, and distillation that depends on the teacher's.

Axes: B sequences (any number of leading axes, also none), T tokens, V vocabulary, K entries of the
teacher's top k, N tokens under the mask.

An entropy bonus is `aggregate(token_entropies(...), mask, kind, normalizer)` times a weight,
subtracted from a loss.

Entropy-aware on-policy distillation adds forward KL if the teacher is uncertain. The rows of both
sides are already aligned. `entropy_opd_loss` is the published method with its hard gate;
`entropy_gated_kl` is a soft gate of this project's own, which exists in no upstream. With
`reduction="none"` every loss gives its terms of tokens [*B T], 0 under no mask and divided by
nothing. The entropies of student and teacher at the distilled tokens are metrics without gradient.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_mesh.losses.blocks import HeadGradients, LinearHead, default_block, tiles
from composer_mesh.losses.fused import check_linear, sum_dtype
from composer_mesh.losses.jsd import kl_terms, row_logprobs
from composer_mesh.losses.logprobs import LOG_RATIO_LIMIT, Aggregation, aggregate
from composer_mesh.losses.reductions import (
    Number,
    Reduction,
    at_least_float32,
    check_clip,
    check_temperature,
    check_top_k,
    normalized_sum,
    reduce_selected,
    unselected,
)


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
        raise ValueError(f"fraction is {fraction} but must be in (0, 1]: use 0.2, or 1 for all")
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


# Upstream's addition to the token count that it divides the forward KL by.
SOFT_EPS = 1e-8


def entropy_opd_loss(
    student_logits: Float[Tensor, "*B T V"],
    teacher_logits: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    targets: Int[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"] | None = None,
    tau: Number = 0.8,
    coef: Number = 1.0,
    top_k: int = 16,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    student_full_vocab: bool = True,
    temperature: Number = 1.0,
    normalizer: Number | None = None,
    soft_normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Entropy-aware on-policy distillation (arXiv 2603.07079), from the logits of both sides.

    The loss of `entropy_opd_from_logprobs`, whose inputs are computed here: the teacher's entropy
    is that of its whole distribution, P is renormalized over the teacher's top k, and S is the
    student over the whole vocabulary (`student_full_vocab`) or renormalized over the same k.
    `targets` are the sampled ids, `old_logprobs` the student's when it sampled them; None is the
    student of now, so that every ratio is 1. The temperature divides both logits; k >= V keeps
    all.
    """
    _check(tau, coef, clip_low, clip_high)
    check_temperature(temperature)
    check_top_k(top_k)
    s = student_logits[mask]
    s_log = row_logprobs(s, temperature)
    t_log = row_logprobs(teacher_logits.detach()[mask], temperature)
    ids = t_log.topk(min(top_k, t_log.shape[-1]), dim=-1).indices
    s_top = s_log.gather(-1, ids)
    chosen = targets[mask].long().unsqueeze(-1)
    logprobs = s_log.gather(-1, chosen).squeeze(-1)
    old = logprobs if old_logprobs is None else old_logprobs[mask]
    pg = _clipped_gradient(logprobs, old, t_log.gather(-1, chosen).squeeze(-1), clip_low, clip_high)
    soft = _gated_forward_kl(
        t_log.gather(-1, ids).log_softmax(-1),
        s_top if student_full_vocab else s_top.log_softmax(-1),
        entropy(t_log) >= tau,
    )
    return _reduced(pg, coef * soft, mask, normalizer, soft_normalizer, aggregation, reduction)


def entropy_opd_from_logprobs(
    logprobs: Float[Tensor, "*B T"],
    old_logprobs: Float[Tensor, "*B T"],
    teacher_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    teacher_entropy: Float[Tensor, "*B T"],
    student_topk_logprobs: Float[Tensor, "*B T K"],
    teacher_topk_logprobs: Float[Tensor, "*B T K"],
    tau: Number = 0.8,
    coef: Number = 1.0,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    normalizer: Number | None = None,
    soft_normalizer: Number | None = None,
    aggregation: Aggregation = "dapo",
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Entropy-aware on-policy distillation (arXiv 2603.07079), from what a teacher would send.

        r    = exp(logprobs - old_logprobs)     A = constant(teacher_logprobs - old_logprobs)
        pg   = sum over tokens of -min(r A, clip(r, 1 - low, 1 + high) A), over normalizer
        soft = sum over tokens with H >= tau of KL(P || S), over normalizer + 1e-8
        loss = pg + coef soft

    The reverse KL of the sampled tokens stays on all tokens; where the teacher's entropy H (nats,
    whole vocabulary) reaches tau, forward KL is added. P and S are at the teacher's top k and
    are used unchanged: the method has P renormalized over the k and S over the whole
    vocabulary. Everything but `logprobs` and `student_topk_logprobs` is detached; `normalizer`
    is the token count of the whole step.

    `aggregation` "grpo" is the mean of sequences: each takes its own mean over tokens, and
    `normalizer` counts sequences with a token. Upstream's "seq-mean-token-mean" averages pg alone
    so and keeps soft over all tokens: that is `soft_normalizer`, their count. Without it soft is
    aggregated as pg is.

    Source: EOPD, `compute_policy_loss_on_policy_distill` (read in the fork CacheEOPD) with its
    defaults; notes elsewhere about a sigmoid gate, tau = log 2 or k = 64 do not match the code.
    Differs: an empty mask gives 0, not NaN; log-ratios beyond +-80 count as +-80; a sequence's mean
    divides by its n tokens, upstream's by n + 1e-8.
    """
    _check(tau, coef, clip_low, clip_high)
    pg = _clipped_gradient(
        logprobs[mask], old_logprobs[mask], teacher_logprobs[mask], clip_low, clip_high
    )
    soft = _gated_forward_kl(
        teacher_topk_logprobs[mask], student_topk_logprobs[mask], teacher_entropy[mask] >= tau
    )
    return _reduced(pg, coef * soft, mask, normalizer, soft_normalizer, aggregation, reduction)


def entropy_gated_kl(
    student: Float[Tensor, "*B T V"],
    teacher: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    h_max: Number | None = None,
    temperature: Number = 1.0,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> Float[Tensor, "..."]:
    """Forward and reverse KL, mixed by the teacher's entropy: our own variant, in no upstream.

        w    = clamp(H(P) / h_max, 0, 1), constant
        loss = sum over tokens of w KL(P || S) + (1 - w) KL(S || P), over normalizer

    If the teacher is certain, the student is drawn to its mode; if not, the student learns to
    cover it. H is in nats over the whole vocabulary; `h_max` defaults to log V, which
    counts padding entries too and which real teachers rarely come near: a value near their
    largest entropy opens the gate further. Logits or log-probabilities of both sides, divided by
    the temperature; no gradient reaches the teacher or w. For the published method, which adds
    forward KL behind a threshold to a policy gradient, see `entropy_opd_loss`.
    """
    check_temperature(temperature)
    s_log = row_logprobs(student[mask], temperature)
    p_log = row_logprobs(teacher.detach()[mask], temperature)
    gate = (entropy(p_log) / _entropy_scale(h_max, p_log.shape[-1])).clamp(0, 1)
    forward, reverse = kl_terms(p_log, s_log).sum(-1), kl_terms(s_log, p_log).sum(-1)
    per_token = gate * forward + (1 - gate) * reverse
    return reduce_selected(per_token, mask, normalizer, reduction)


def entropy(logprobs: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """Entropy of normalized rows in nats; entries of -inf contribute 0."""
    terms = torch.where(logprobs > -math.inf, logprobs, 0.0)
    return -(logprobs.exp() * terms).sum(-1)


def _reduced(
    pg: Float[Tensor, "N"],
    soft: Float[Tensor, "N"],
    mask: Bool[Tensor, "*B T"],
    normalizer: Number | None,
    soft_normalizer: Number | None,
    aggregation: Aggregation,
    reduction: Reduction,
) -> Float[Tensor, "..."]:
    """The reduced sum of both terms of entropy-aware distillation."""
    if reduction == "none" or normalizer is None:
        return reduce_selected(pg + soft, mask, normalizer, reduction)
    loss = aggregate(unselected(pg, mask), mask, aggregation, normalizer)
    if soft_normalizer is not None:
        return loss + normalized_sum(soft, soft_normalizer + SOFT_EPS)
    return loss + aggregate(unselected(soft, mask), mask, aggregation, normalizer + SOFT_EPS)


def _clipped_gradient(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    teacher_logprobs: Float[Tensor, "N"],
    low: Number,
    high: Number,
) -> Float[Tensor, "N"]:
    """Clipped policy gradient with the teacher's log-prob less the old one as advantage."""
    new, old = at_least_float32(logprobs), at_least_float32(old_logprobs.detach())
    advantage = at_least_float32(teacher_logprobs.detach()) - old
    ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def _gated_forward_kl(
    p_log: Float[Tensor, "N K"], s_log: Float[Tensor, "N K"], gate: Bool[Tensor, "N"]
) -> Float[Tensor, "N"]:
    """KL(P || S) of each row under the gate, 0 elsewhere; no gradient reaches P."""
    forward = kl_terms(at_least_float32(p_log.detach()), at_least_float32(s_log)).sum(-1)
    return torch.where(gate, forward, 0.0)


def _entropy_scale(h_max: Number | None, vocabulary: int) -> float:
    if h_max is None:
        # A single entry has zero entropy to divide by.
        return math.log(vocabulary) if vocabulary > 1 else 1.0
    if not h_max > 0:
        raise ValueError(f"h_max is {h_max} but must be > 0 nats: use None for log V")
    return h_max


def _check(tau: Number, coef: Number, low: Number, high: Number) -> None:
    if not tau >= 0:
        raise ValueError(f"tau is {tau} but an entropy is >= 0 nats: use 0.8, or inf for no gate")
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"coef is {coef} but must be finite and >= 0: use 1.0")
    check_clip(low, high)


@dataclass(frozen=True)
class DistillationFigures:
    """Entropies in nats, summed over the normalizer as the losses are; detached."""

    student_entropy: Float[Tensor, "..."]
    teacher_entropy: Float[Tensor, "..."]


@torch.no_grad()
def distillation_figures(
    student: Float[Tensor, "*B T V"],
    teacher: Float[Tensor, "*B T V"],
    mask: Bool[Tensor, "*B T"],
    *,
    temperature: Number = 1.0,
    normalizer: Number | None = None,
    reduction: Reduction = "sum",
) -> DistillationFigures:
    """Entropies of both sides' rows, from logits or log-probs, at the temperature of the loss.

    With the token count of the step as normalizer they add up to the mean over its tokens; with
    `reduction="none"` they are those of each token [*B T], 0 under no mask.
    """
    check_temperature(temperature)
    both = (entropy(row_logprobs(rows[mask], temperature)) for rows in (student, teacher))
    found = [reduce_selected(entropies, mask, normalizer, reduction) for entropies in both]
    return DistillationFigures(*found)

"""Unreduced terms of preference losses, one per pair, by type of loss.

Axes: B pairs (any number of leading axes, also none).

A score measures how far the policy has moved an answer from the reference: the log-ratio, or
another f-divergence's function of it. Callers handle lengths, tokens and normalizers.
Log-probabilities of whole answers come from those of their tokens (T tokens, V vocabulary).
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from composer_mesh.losses.logprobs import LOG_RATIO_LIMIT
from composer_mesh.losses.reductions import Number, at_least_float32, check_choice, check_fraction


def sequence_logprobs(
    token_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
    *,
    ld_alpha: Number | None = None,
    shared_lengths: Int[Tensor, "*B"] | None = None,
) -> Float[Tensor, "*B"]:
    """Log-probability of each answer: the sum over its tokens, 0 for an answer without any.

    With `mask.sum(-1)` as its length, it is the input of every preference loss.

    `ld_alpha` weighs the tokens beyond the first `shared_lengths` of an answer (LD-DPO, arXiv
    2409.06411): 1 changes nothing, 0 leaves them out. The shared length of a pair is that of its
    shorter answer; policy and reference are to be summed alike. Agrees with TRL's
    `DPOTrainer._compute_loss`.
    """
    values = torch.where(mask, at_least_float32(token_logprobs), 0.0)
    if ld_alpha is None and shared_lengths is None:
        return values.sum(-1)
    if ld_alpha is None or shared_lengths is None:
        raise ValueError(
            f"ld_alpha is {ld_alpha} and shared_lengths are"
            f" {'not ' if shared_lengths is None else ''}given: pass both, or neither"
        )
    repair = "1 weighs all tokens alike, 0 leaves out what is beyond the shared length"
    check_fraction("ld_alpha", ld_alpha, repair)
    beyond = mask.cumsum(-1) > shared_lengths.unsqueeze(-1)
    return torch.where(beyond, ld_alpha * values, values).sum(-1)


def wpo_weights(
    token_logprobs: Float[Tensor, "*B T"],
    collision_logprobs: Float[Tensor, "*B T"],
    mask: Bool[Tensor, "*B T"],
) -> Float[Tensor, "*B"]:
    """How typical each answer is of the policy, detached (WPO, arXiv 2406.11827, equation 2).

        w = exp(mean over tokens of (log p(token) - log sum over v of p(v)^2))

    A pair's weight is the product of those of its answers: `weights` of the preference losses. An
    answer without tokens has 1. `collision_logprobs` are those of the function of that name.
    Agrees with TRL's `use_weighting`.
    """
    aligned = at_least_float32(token_logprobs.detach()) - at_least_float32(
        collision_logprobs.detach()
    )
    return (torch.where(mask, aligned, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)).exp()


def collision_logprobs(logits: Float[Tensor, "*B T V"]) -> Float[Tensor, "*B T"]:
    """Log-probability that two samples of a row are equal, log sum p^2; detached."""
    scores = at_least_float32(logits.detach())
    return (2 * scores).logsumexp(-1) - 2 * scores.logsumexp(-1)


PreferenceType = Literal[
    "sigmoid", "hinge", "robust", "exo_pair", "apo_zero", "apo_down", "bco_pair", "sigmoid_norm"
]
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]

Scores = Float[Tensor, "*B"]


def divergence_scores(
    log_ratios: Float[Tensor, "*B"], kind: FDivergence, f_alpha: Number
) -> Float[Tensor, "*B"]:
    """f'(u) at u = exp(log-ratio), without its constant: the scores of f-DPO (arXiv 2309.16240).

        reverse_kl        log u, which is DPO       js_divergence     log sigmoid(log u)
        forward_kl        -1 / u                    alpha_divergence  u^(a - 1) / (a - 1)

    a is `f_alpha`, 1 less the paper's alpha, as in TRL: 1 is reverse KL and 0 forward KL. Exponents
    above 80 count as 80, so that they are finite in float32.
    """
    check_choice("f_divergence_type", kind, get_args(FDivergence))
    if kind == "js_divergence":
        return logsigmoid(log_ratios)
    slope = -1.0 if kind == "forward_kl" else f_alpha - 1.0
    if kind == "reverse_kl" or abs(slope) < 1e-6:
        return log_ratios
    return (slope * log_ratios).clamp(max=LOG_RATIO_LIMIT).exp() / slope


def pair_terms(
    kind: PreferenceType, chosen: Scores, rejected: Scores, beta: Number, e: Number
) -> Float[Tensor, "*B"]:
    """Loss of each pair from the scores of its answers; e is the label smoothing."""
    check_choice("loss_type", kind, tuple(_TERMS))
    _check_smoothing(kind, e)
    return _TERMS[kind](beta * chosen, beta * rejected, e)


def check_divergence(kind: str, f_divergence_type: FDivergence) -> None:
    """Raise for types whose formula needs log-ratios if the scores are of another divergence."""
    if f_divergence_type != "reverse_kl" and kind in ("apo_zero", "apo_down"):
        raise ValueError(
            f"f_divergence_type is {f_divergence_type!r} but loss_type {kind!r} is defined on"
            " log-ratios: use 'reverse_kl', or 'sigmoid'"
        )


def _smoothed(z: Scores, e: Number) -> Scores:
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def _exo_pair(c: Scores, r: Scores, e: Number) -> Scores:
    z, smoothed = c - r, torch.tensor(e, dtype=c.dtype, device=c.device)
    right = torch.sigmoid(z) * (logsigmoid(z) - torch.log1p(-smoothed))
    return right + torch.sigmoid(-z) * (logsigmoid(-z) - smoothed.log())


_TERMS: Mapping[str, Callable[[Scores, Scores, Number], Tensor]] = {
    "sigmoid": lambda c, r, e: _smoothed(c - r, e),
    "sigmoid_norm": lambda c, r, e: _smoothed(c - r, e),
    "hinge": lambda c, r, _: torch.relu(1 - (c - r)),
    "robust": lambda c, r, e: (-(1 - e) * logsigmoid(c - r) + e * logsigmoid(r - c)) / (1 - 2 * e),
    "exo_pair": _exo_pair,
    "apo_zero": lambda c, r, _: torch.sigmoid(-c) + torch.sigmoid(r),
    "apo_down": lambda c, r, _: torch.sigmoid(c) + torch.sigmoid(r - c),
    "bco_pair": lambda c, r, _: -logsigmoid(c) - logsigmoid(-r),
}
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair")
"""Types that use the label smoothing."""


def _check_smoothing(kind: PreferenceType, e: Number) -> None:
    if e > 0 and kind not in SMOOTHED:
        raise ValueError(f"label_smoothing is {e} but {kind} has none: use 0, or 'sigmoid'")
    if e == 0 and kind == "exo_pair":
        raise ValueError(
            "label_smoothing is 0 but exo_pair takes its logarithm: use 1e-3 as its paper"
        )
